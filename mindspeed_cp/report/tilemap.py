"""Who computes which tile when: a plan's forward as a picture.

A row for each rank, a square for each step. A square is the attention matrix of the whole batch, queries downwards and
keys to the right; grey is what the mask lets queries see, colour what this rank computes in this step. The colour is
that of the rank that has these keys and values (after the move, where rows move before the steps). All squares have one
scale, so that area is work::

                 holds          step 0        step 1
    rank 0  1,200 tokens ▬▬     |◣   |        |    |     ▆▆▆ work
                                |   ◣|        |■   |
    rank 1  1,200 tokens ▬▬     | ◣  |        |■   |     ▆▆▆ work
                                |  ◣ |        |■   |

Rows that move before and after, as Ulysses does, are bands beside the squares. Where tiles would be too many or too
small to be seen, as of 32 ranks and more, a square is shaded by the work in it instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan import Plan
from mindspeed_cp.report.areas import Area, areas, owners, size, visible
from mindspeed_cp.report.page import Page, colours, shading
from mindspeed_cp.report.summary import PlanSummary, summarize
from mindspeed_cp.report.text import attention_text, heads_text
from mindspeed_cp.report.wording import arrivals, exchanging, held_text, of_ranks, some_documents

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TILES = 20_000  # more than this take long and show nothing: squares are then shaded by their work
LEAST_PIXELS = 4.0  # so too where half of the work is in tiles that are smaller than this
MOST_OUTLINES = 40_000
DPI = 110
GREY = "0.88"


def draw_tile_map(plan: Plan, path: str | Path, summary: PlanSummary | None = None) -> Path:
    """Write the picture of a plan's forward to a PNG file.

    Args:
        plan: any plan.
        path: file to write, with the suffix .png.
        summary: `summarize(plan)`, if it is at hand.

    Raises:
        ConfigError: the file cannot be written, or has another suffix.
    """
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"--png {path}: the suffix is {Path(path).suffix!r}; valid: a file name with .png")
    figure = tile_map(plan, summary)
    target = Path(path)
    aside = target.with_name(f".{target.name}.new")
    try:
        figure.savefig(aside, dpi=DPI, format="png")
        aside.replace(target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--png {path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    finally:
        aside.unlink(missing_ok=True)
    return target


def tile_map(plan: Plan, summary: PlanSummary | None = None) -> Figure:
    """The picture as a matplotlib figure."""
    numbers = summary if summary is not None else summarize(plan)
    page = Page.of(numbers, DPI)
    scale = np.array([max(plan.kv_documents.tokens, 1), max(plan.documents.tokens, 1)])
    many = int(numbers.tiles.sum()) > MOST_TILES
    drawn = [] if many else [[a._replace(corners=a.corners / scale) for a in areas(plan, r)] for r in range(plan.ranks)]
    pixels = 0.0 if many else _typical(drawn) * page.cell * DPI
    page.shaded = pixels < LEAST_PIXELS
    _title(page, numbers)
    _ranks(page, plan, numbers)
    _squares(page, plan, numbers, scale, drawn)
    if numbers.moves:
        _moves(page, plan, numbers)
    _bars(page, numbers)
    small = f"Typical tiles would be {pixels:.1f} pixels wide, too small"
    _legend(page, plan, numbers, f"There are {numbers.tiles.sum():,} tiles, too many" if many else small)
    return page.figure


def _typical(drawn: Sequence[Sequence[Area]]) -> float:
    """Side of a tile in unit squares such that half of the area is in tiles that are larger; for no tiles infinite."""
    sizes = np.sort([size(area.corners) for of in drawn for area in of])
    if not len(sizes):
        return np.inf
    summed = np.cumsum(sizes)
    return float(np.sqrt(sizes[np.searchsorted(summed, summed[-1] / 2)]))


def _title(page: Page, numbers: PlanSummary) -> None:
    nodes = f" ({numbers.topology.nodes} nodes)" if numbers.topology.nodes > 1 else ""
    page.title(
        f"{numbers.algorithm}: {some_documents(numbers.lengths, numbers.kv_lengths)} over {numbers.ranks} ranks{nodes}",
        f"forward, {attention_text(numbers.attention)}; attention work of the slowest rank / mean: "
        f"{numbers.imbalance:.3f}",
    )


def _ranks(page: Page, plan: Plan, numbers: PlanSummary) -> None:
    """At the left of each row: the rank, its colour, what it holds of the packed row, its heads."""
    page.heading(page.left, page.holds, "holds")
    palette = colours(numbers.ranks)
    layouts = [plan.layout, plan.layout_kv][: 1 + _is_crossed(numbers)]
    for rank in range(numbers.ranks):
        held = held_text(plan, numbers, rank)
        computes = f"computes {_heads(numbers, rank, kv=True)}" if numbers.splits_heads and not numbers.parts else ""
        page.rank(rank, palette[rank], held, computes, [_strip(layout, rank) for layout in layouts])
    if plan.topology.nodes > 1:
        for node in range(plan.topology.nodes):
            first = node * plan.topology.ranks_per_node
            page.node(f"node {node}", first, first + plan.topology.ranks_per_node - 1)


def _strip(layout: Layout, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """What a rank holds of a packed row, and the borders between its documents, as shares of the row."""
    spans, tokens = layout.of(rank), max(layout.documents.tokens, 1)
    borders = layout.documents.offsets[1:-1] / tokens if len(layout.documents) <= 64 else np.empty(0)
    return np.stack([spans["start"], spans["stop"]], 1) / tokens, borders


def _is_crossed(numbers: PlanSummary) -> bool:
    """True where keys have lengths of their own."""
    return numbers.kv_lengths is not numbers.lengths


def _heads(numbers: PlanSummary, rank: int, kv: bool = False) -> str:
    first, last = numbers.heads[rank, :2]
    return f"{'no heads' if first == last else 'head' if last == first + 1 else 'heads'}" + (
        f" {heads_text(numbers, rank, kv)}" if last > first else ""
    )


def _squares(page: Page, plan: Plan, numbers: PlanSummary, scale: np.ndarray, drawn: Sequence[Sequence[Area]]) -> None:
    for step in range(numbers.steps):
        page.heading(*page.column(step), f"{'step ' * page.captions}{numbers.labels[step]}")
    palette = colours(numbers.ranks)
    largest = max(int(numbers.work.max(initial=0)), 1)
    for rank in range(numbers.ranks):
        for step, ((part, part_step), of) in enumerate(zip(plan.turns(), owners(plan, rank), strict=True)):
            piece, its = plan.pieces[part], (numbers.parts or (numbers,))[part]
            heads = f"{_heads(its, rank)}: " if its.splits_heads else ""
            busy = numbers.work[rank, step] > 0
            above = heads + of_ranks(piece, rank, of) if busy else ""
            page.square(rank, step, above, arrivals(piece, rank, part_step))
            if page.shaded:
                page.shade(rank, step, float(numbers.work[rank, step]) / largest, [palette[o] for o in of if busy])
    if page.shaded:
        return
    outlines = _outlines(plan, scale, page)
    page.polygons([page.in_square(r, s, o) for r, s in np.ndindex(numbers.work.shape) for o in outlines], GREY)
    corners: list[np.ndarray] = []
    fill: list[Sequence[float]] = []
    for rank, mine in enumerate(drawn):
        for area in mine:
            corners.append(page.in_square(rank, area.step, area.corners))
            fill.append(palette[area.owner])
    page.polygons(corners, fill, line=0.3)


def _outlines(plan: Plan, scale: np.ndarray, page: Page) -> list[np.ndarray]:
    """What the mask shows, for the documents that are large enough to be seen, and not more than can be drawn."""
    found = [corners / scale for corners in visible(plan)]
    seen = [corners for corners in found if np.ptp(corners, 0).max() * page.cell * DPI > 0.5]
    seen.sort(key=lambda corners: -float(np.ptp(corners, 0).max()))
    return seen[: MOST_OUTLINES // page.cells]


def _moves(page: Page, plan: Plan, numbers: PlanSummary) -> None:
    """Bands before and after the steps, over the ranks that exchange rows."""
    before, after = ("all-to-all: tokens → heads (Q, K, V)", "all-to-all: heads → tokens (output)")
    if not numbers.splits_heads:
        before, after = ("rows move to where they are computed (Q, K, V)", "rows move back (output)")
    for group in exchanging(plan):
        page.band(page.before, group[0], group[-1], before)
        page.band(page.after, group[0], group[-1], after)


def _bars(page: Page, numbers: PlanSummary) -> None:
    work = numbers.work.sum(1)
    page.heading(page.bars, page.bar_width, "work / mean")
    for rank, share in enumerate(work / (work.mean() or 1)):
        page.bar(rank, share, max(float(work.max()) / (work.mean() or 1), 1.0))


def _legend(page: Page, plan: Plan, numbers: PlanSummary, why_shaded: str) -> None:
    moved = " after the all-to-all" if any(piece.kv_move is not None for piece in plan.pieces) else ""
    if page.shaded:
        entries: list[tuple[Sequence[Any], str]] = [
            ([shading(share) for share in (0, 0.5, 1)], "the darker, the more work of this rank in this step"),
            (colours(numbers.ranks)[:3], f"along the top, the colours of the ranks whose keys it is against{moved}"),
        ]
        notes = [f"{why_shaded} to draw: a square's shade is the work of all its tiles, and white is none."]
    else:
        some = colours(numbers.ranks)[:3]
        now = (
            f"computed by this rank in this step; the colour is that of the rank that has these keys and values{moved}"
        )
        entries = [([GREY], "what the mask lets queries see"), (some, now)]
        notes = [
            "Each square is the attention matrix of the whole batch: queries downwards, keys to the right, one block "
            "on the diagonal for each document. All squares have one scale: coloured area "
            f"{'times heads ' * numbers.splits_heads}is work."
        ]
    if numbers.parts:
        names = "; ".join(f"{number} by {part.algorithm}" for number, part in enumerate(numbers.parts))
        notes.append(f"Steps are named part.step: documents are in parts that each go their own way ({names}).")
    if _is_crossed(numbers):
        notes.append("What ranks hold: queries in the upper strip, keys and values in the lower.")
    if numbers.splits_heads:
        notes.append("Ranks that exchange tokens for heads compute the same tokens, each for its own heads.")
    if page.captions and numbers.received.any():
        notes.append("Below a square: rows of keys and values that arrive during the step, for a later one.")
    page.legend(entries, notes)
