"""Tile map: which rank computes which tile when, as a picture of a plan's forward.

A row for each rank, a square for each step. A square is the attention matrix of the whole batch, queries downwards and
keys to the right. Grey is what the mask makes visible, colour is what the rank computes in the step; the colour is
that of the rank that holds the keys and values (after the redistribution, if there is one). All squares have one
scale, so that area is work::

                 holds          step 0        step 1
    rank 0  1,200 tokens ▬▬     |◣   |        |    |     ▆▆▆ work
                                |   ◣|        |■   |
    rank 1  1,200 tokens ▬▬     | ◣  |        |■   |     ▆▆▆ work
                                |  ◣ |        |■   |

Redistributions before and after the steps are bands beside the squares. If there are too many tiles, or too small
ones, as for 32 ranks and more, each square is shaded by its work instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_cp.layout import Layout
from mindspeed_cp.plan import Plan
from mindspeed_cp.report.files import check_output_path, write_atomically
from mindspeed_cp.report.plan.summary import PlanSummary, summarize_plan
from mindspeed_cp.report.plan.tables import describe_heads
from mindspeed_cp.report.plan.tile_map_canvas import TileMapCanvas, rank_colours, shade_of
from mindspeed_cp.report.plan.tile_map_content import (
    TilePolygon,
    describe_arrivals,
    describe_documents,
    describe_holding,
    describe_kv_source,
    kv_sources,
    mask_outlines,
    polygon_area,
    redistribution_groups,
    tile_polygons,
)
from mindspeed_cp.report.text import describe_attention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN_TILE_LIMIT = 20_000  # squares are shaded beyond this number, which takes long and shows nothing
MIN_TILE_PIXELS = 4.0  # squares are shaded if half of the work is in smaller tiles
OUTLINE_LIMIT = 40_000
DPI = 110
GREY = "0.88"


def draw_tile_map(plan: Plan, path: str | Path, summary: PlanSummary | None = None) -> Path:
    """Write the picture of a plan's forward to a PNG file.

    Args:
        plan: any plan.
        path: file to write, with the suffix .png.
        summary: `summarize_plan(plan)`, if it is at hand.

    Raises:
        ConfigError: the file cannot be written, or has another suffix.
    """
    target = check_output_path("--png", path, (".png",))
    figure = tile_map(plan, summary)
    return write_atomically("--png", target, lambda new: figure.savefig(new, dpi=DPI, format="png"))


def tile_map(plan: Plan, summary: PlanSummary | None = None) -> Figure:
    """Return the picture as a matplotlib figure."""
    summary = summary if summary is not None else summarize_plan(plan)
    canvas = TileMapCanvas(summary, DPI)
    scale = np.array([max(plan.kv_documents.tokens, 1), max(plan.documents.tokens, 1)])
    has_too_many = int(summary.tiles.sum()) > DRAWN_TILE_LIMIT
    polygons = (
        []
        if has_too_many
        else [
            [polygon._replace(corners=polygon.corners / scale) for polygon in tile_polygons(plan, rank)]
            for rank in range(plan.ranks)
        ]
    )
    pixels = 0.0 if has_too_many else _typical(polygons) * canvas.cell * DPI
    canvas.shaded = pixels < MIN_TILE_PIXELS
    _title(canvas, summary)
    _ranks(canvas, plan, summary)
    _squares(canvas, plan, summary, scale, polygons)
    if summary.has_redistribution:
        _redistributions(canvas, plan, summary)
    _bars(canvas, summary)
    why_small = f"Typical tiles would be {pixels:.1f} pixels wide, too small"
    _legend(canvas, plan, summary, f"There are {summary.tiles.sum():,} tiles, too many" if has_too_many else why_small)
    return canvas.figure


def _typical(polygons: Sequence[Sequence[TilePolygon]]) -> float:
    """Return the side, in unit squares, of a tile such that larger tiles make half of the area; infinite without
    tiles."""
    sizes = np.sort([polygon_area(polygon.corners) for of_rank in polygons for polygon in of_rank])
    if not len(sizes):
        return np.inf
    cumulated = np.cumsum(sizes)
    return float(np.sqrt(sizes[np.searchsorted(cumulated, cumulated[-1] / 2)]))


def _of_trees(summary: PlanSummary) -> str:
    trees = 0 if summary.plan.documents.trees is None else int(summary.plan.documents.tree_numbers[-1]) + 1
    return f", documents of {trees:,} tree{'s' * (trees > 1)}" if trees else ""


def _title(canvas: TileMapCanvas, summary: PlanSummary) -> None:
    nodes = f" ({summary.plan.topology.nodes} nodes)" if summary.plan.topology.nodes > 1 else ""
    canvas.title(
        f"{summary.plan.algorithm}: {describe_documents(summary.lengths, summary.kv_lengths)} over {summary.ranks} "
        f"ranks{nodes}",
        f"forward, {describe_attention(summary.plan.attention)}{_of_trees(summary)}; attention work of the slowest "
        f"rank / mean: {summary.imbalance:.3f}",
    )


def _ranks(canvas: TileMapCanvas, plan: Plan, summary: PlanSummary) -> None:
    """Draw at the left of each row the rank, its colour, what it holds of the packed row, and its heads."""
    canvas.column_title(canvas.left, canvas.holds, "holds")
    palette = rank_colours(summary.ranks)
    layouts = [plan.layout, plan.kv_layout_in][: 1 + _is_crossed(summary)]
    for rank in range(summary.ranks):
        holding = describe_holding(plan, summary, rank)
        computes = f"computes {_heads(summary, rank, kv=True)}" if summary.splits_heads and not summary.parts else ""
        canvas.draw_rank(rank, palette[rank], holding, computes, [_strip(layout, rank) for layout in layouts])
    if plan.topology.nodes > 1:
        for node in range(plan.topology.nodes):
            first = node * plan.topology.ranks_per_node
            canvas.draw_node(f"node {node}", first, first + plan.topology.ranks_per_node - 1)


def _strip(layout: Layout, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the spans that a rank holds of a packed row, and the borders between documents, as shares of the row."""
    spans, tokens = layout.rank_spans(rank), max(layout.documents.tokens, 1)
    borders = layout.documents.offsets[1:-1] / tokens if len(layout.documents) <= 64 else np.empty(0)
    return np.stack([spans["start"], spans["stop"]], 1) / tokens, borders


def _is_crossed(summary: PlanSummary) -> bool:
    """Return True if keys have lengths of their own (cross-attention)."""
    return summary.kv_lengths is not summary.lengths


def _heads(summary: PlanSummary, rank: int, kv: bool = False) -> str:
    first, last = summary.heads[rank, :2]
    return f"{'no heads' if first == last else 'head' if last == first + 1 else 'heads'}" + (
        f" {describe_heads(summary, rank, kv)}" if last > first else ""
    )


def _squares(
    canvas: TileMapCanvas,
    plan: Plan,
    summary: PlanSummary,
    scale: np.ndarray,
    polygons: Sequence[Sequence[TilePolygon]],
) -> None:
    for step in range(summary.steps):
        canvas.column_title(*canvas.column(step), f"{'step ' * canvas.captions}{summary.labels[step]}")
    palette = rank_colours(summary.ranks)
    largest = max(int(summary.work.max(initial=0)), 1)
    for rank in range(summary.ranks):
        for step, ((part, part_step), sources) in enumerate(
            zip(plan.step_order(), kv_sources(plan, rank), strict=True)
        ):
            part_plan, part_summary = plan.parts_or_self[part], (summary.parts or (summary,))[part]
            heads = f"{_heads(part_summary, rank)}: " if part_summary.splits_heads else ""
            has_work = summary.work[rank, step] > 0
            above = heads + describe_kv_source(part_plan, rank, sources) if has_work else ""
            canvas.draw_square(rank, step, above, describe_arrivals(part_plan, rank, part_step))
            if canvas.shaded:
                canvas.shade_square(
                    rank,
                    step,
                    float(summary.work[rank, step]) / largest,
                    [palette[outline] for outline in sources if has_work],
                )
    if canvas.shaded:
        return
    outlines = _outlines(plan, scale, canvas)
    canvas.draw_polygons(
        [
            canvas.in_square(row, column, outline)
            for row, column in np.ndindex(summary.work.shape)
            for outline in outlines
        ],
        GREY,
    )
    corners: list[np.ndarray] = []
    fill: list[Sequence[float]] = []
    for rank, of_rank in enumerate(polygons):
        for polygon in of_rank:
            corners.append(canvas.in_square(rank, polygon.step, polygon.corners))
            fill.append(palette[polygon.owner])
    canvas.draw_polygons(corners, fill, line=0.3)


def _outlines(plan: Plan, scale: np.ndarray, canvas: TileMapCanvas) -> list[np.ndarray]:
    """Return the visible pairs of the documents that are large enough to be seen, and not more than can be drawn."""
    outlines = [corners / scale for corners in mask_outlines(plan)]
    large = [corners for corners in outlines if np.ptp(corners, 0).max() * canvas.cell * DPI > 0.5]
    large.sort(key=lambda corners: -float(np.ptp(corners, 0).max()))
    return large[: OUTLINE_LIMIT // canvas.cells]


def _redistributions(canvas: TileMapCanvas, plan: Plan, summary: PlanSummary) -> None:
    """Draw bands before and after the steps over the ranks that exchange rows."""
    before, after = ("all-to-all: tokens → heads (Q, K, V)", "all-to-all: heads → tokens (output)")
    if not summary.splits_heads:
        before, after = ("rows move to where they are computed (Q, K, V)", "rows move back (output)")
    for group in redistribution_groups(plan):
        canvas.draw_band(canvas.before, group[0], group[-1], before)
        canvas.draw_band(canvas.after, group[0], group[-1], after)


def _bars(canvas: TileMapCanvas, summary: PlanSummary) -> None:
    work = summary.work.sum(1)
    canvas.column_title(canvas.bars, canvas.bar_width, "work / mean")
    for rank, share in enumerate(work / (work.mean() or 1)):
        canvas.draw_bar(rank, share, max(float(work.max()) / (work.mean() or 1), 1.0))


def _legend(canvas: TileMapCanvas, plan: Plan, summary: PlanSummary, why_shaded: str) -> None:
    after_redistribution = (
        " after the all-to-all"
        if any(part_plan.kv_redistribution is not None for part_plan in plan.parts_or_self)
        else ""
    )
    if canvas.shaded:
        entries: list[tuple[Sequence[Any], str]] = [
            ([shade_of(share) for share in (0, 0.5, 1)], "the darker, the more work of this rank in this step"),
            (
                rank_colours(summary.ranks)[:3],
                f"along the top, the colours of the ranks whose keys it is against{after_redistribution}",
            ),
        ]
        notes = [f"{why_shaded} to draw: a square's shade is the work of all its tiles, and white is none."]
    else:
        sample_colours = rank_colours(summary.ranks)[:3]
        meaning = (
            "computed by this rank in this step; the colour is that of the rank that has these keys and "
            f"values{after_redistribution}"
        )
        entries = [([GREY], "what the mask lets queries see"), (sample_colours, meaning)]
        notes = [
            "Each square is the attention matrix of the whole batch: queries downwards, keys to the right, one block "
            "on the diagonal for each document. All squares have one scale: coloured area "
            f"{'times heads ' * summary.splits_heads}is work."
        ]
        if summary.plan.documents.trees is not None:
            notes.append("Rectangles below the diagonal: documents that continue others see all of their tokens.")
        if summary.plan.documents.blocks is not None:
            notes.append("Squares over the diagonal: tokens of a block see each other both ways.")
    if summary.parts:
        names = "; ".join(f"{number} by {part.plan.algorithm}" for number, part in enumerate(summary.parts))
        notes.append(f"Steps are named part.step: documents are in parts that each go their own way ({names}).")
    if _is_crossed(summary):
        notes.append("What ranks hold: queries in the upper strip, keys and values in the lower.")
    if summary.splits_heads:
        notes.append("Ranks that exchange tokens for heads compute the same tokens, each for its own heads.")
    if canvas.captions and summary.received.any():
        notes.append("Below a square: rows of keys and values that arrive during the step, for a later one.")
    canvas.legend(entries, notes)
