"""Tile map: which rank computes which pairs when, as a picture of a plan's forward.

A row for each rank, a square for each step. A square is the attention matrix of the whole batch, queries downwards and
keys to the right. Grey is what the mask makes visible, colour is what the rank computes in the step; the colour is
that of the rank that holds the keys and values (after the redistribution, if there is one). All squares have one
scale, so that area is work::

                       step 0        step 1     work / mean
    rank 0  ▬▬         |◣   |        |    |     0.98
    1,200 tokens       |   ◣|        |■   |

Squares are sampled: a pixel stands for the pair of tokens at its centre. If documents or chunks are smaller than
pixels, each square is shaded by its work instead.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.plan import Plan
from mindspeed_cp.report.figure import drawn_text, new_figure, rank_colours, write_png
from mindspeed_cp.report.plan import PlanSummary, describe_heads, summarize_plan
from mindspeed_cp.report.text import describe_attention, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110
MAX_WIDTH, MAX_HEIGHT = 15.0, 9.0  # inches, of a picture whose squares are not of the least size
MAX_SQUARE, MIN_SQUARE, MIN_CAPTIONED_SQUARE = 1.8, 0.05, 1.15
MARGIN, TOP, LEGEND, NAMES, WORK, CAPTION = 0.25, 1.0, 1.1, 1.75, 0.9, 0.17
MIN_RUN_PIXELS = 3.0  # squares are shaded if coloured runs are shorter on average
GREY, FRAME = 0.88, 0.6


def draw_tile_map(plan: Plan, path: str | Path, summary: PlanSummary | None = None) -> Path:
    """Write the picture of a plan's forward to a PNG file.

    Args:
        plan: any plan.
        path: file to write, with the suffix .png.
        summary: `summarize_plan(plan)`, if it is at hand.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written or has another suffix.
    """
    return write_png(tile_map(plan, summary), path)


def tile_map(plan: Plan, summary: PlanSummary | None = None) -> Figure:
    """Return the picture as a matplotlib figure."""
    summary = summary if summary is not None else summarize_plan(plan)
    page = _Page(summary)
    queries, keys = (
        (np.arange(page.pixels) * 2 + 1) * documents.tokens // (2 * page.pixels)
        for documents in (plan.documents, plan.kv_documents)
    )
    seen = visible(plan, queries, keys)
    owners = [computed_squares(plan, rank, queries, keys, seen) for rank in range(plan.ranks)]
    is_shaded = bool(summary.work.any()) and _mean_run(owners) < MIN_RUN_PIXELS
    palette = np.array(rank_colours(plan.ranks))
    for rank in range(plan.ranks):
        for step in range(summary.steps):
            if is_shaded:
                share = summary.work[rank, step] / summary.work.max()
                image = 1 - share * np.array([0.9, 0.7, 0.45])
            else:
                image = np.where(seen, GREY, 1.0)[:, :, None].repeat(3, 2)
                computed = owners[rank][step] >= 0
                image[computed] = palette[owners[rank][step][computed]]
            page.fill_square(rank, step, image)
            if page.has_captions:
                page.caption(rank, step, describe_arrivals(plan, rank, step))
    page.show_squares()
    _label(page, plan, summary, palette)
    page.legend(_notes(plan, summary, is_shaded), palette, is_shaded)
    return page.figure


def visible(plan: Plan, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return True for each pair of some queries and keys that the mask makes visible, bool [queries, keys].

    Args:
        plan: any plan.
        queries: tokens of `plan.documents`, int64 [queries].
        keys: tokens of `plan.kv_documents`, int64 [keys].
    """
    if not plan.documents.tokens or not plan.kv_documents.tokens:
        return np.zeros((len(queries), len(keys)), bool)
    q_doc, k_doc = plan.documents.document_of(queries), plan.kv_documents.document_of(keys)
    index, documents_seen = plan.documents.seen_documents(q_doc)
    sees = np.zeros((len(queries), len(plan.documents)), bool)
    sees[index, documents_seen] = True
    q_position, k_position = (
        tokens - documents.offsets[doc] + documents.first_positions[doc]
        for tokens, documents, doc in ((queries, plan.documents, q_doc), (keys, plan.kv_documents, k_doc))
    )
    left, right = plan.attention.visible_range
    ahead = k_position[None] - q_position[:, None]
    out: np.ndarray = sees[:, k_doc] & (ahead >= -left) & (ahead <= right)
    blocks = plan.documents.blocks
    if blocks is not None and len(blocks.start):
        q_block, k_block = (np.searchsorted(blocks.start, tokens, "right") - 1 for tokens in (queries, keys))
        in_block = (q_block >= 0) & (queries < blocks.stop[q_block])
        out |= in_block[:, None] & (q_block[:, None] == k_block[None]) & (keys < blocks.stop[k_block])[None]
    return out


def computed_squares(plan: Plan, rank: int, queries: np.ndarray, keys: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return the ranks that hold the keys of the pairs that a rank computes, int64 [steps, queries, keys].

    A rank computes in a step all visible pairs of its queries and of the keys that its slots hold in that step. Pairs
    that it does not compute are -1.

    Args:
        plan: any plan.
        rank: the rank that computes.
        queries, keys: tokens, ascending.
        seen: `visible(plan, queries, keys)`.
    """
    order = plan.step_order()
    step_numbers = {part_step: number for number, part_step in enumerate(order)}
    out = np.full((len(order), len(queries), len(keys)), -1)
    for number, part in enumerate(plan.parts_or_self):
        q_shift, k_shift = (
            whole.offsets[:-1] - of_part.offsets[:-1]
            for whole, of_part in ((plan.documents, part.documents), (plan.kv_documents, part.kv_documents))
        )
        if not part.q_layout_compute.head_counts(plan.attention.heads)[rank]:
            continue
        held = np.zeros(len(queries), bool)
        held[_samples(part.q_layout_compute.rank_spans(rank), q_shift, queries)[0]] = True
        contents = part.forward.contents_of(rank)
        spans = part.forward.spans[ragged_arange(contents["first"], contents["count"])]
        key, span = _samples(spans, k_shift, keys)
        steps = np.array([step_numbers[number, step] for step in range(part.forward.steps)], np.int64)
        owners = np.full((len(order), len(keys)), -1)
        owners[steps[np.repeat(contents["step"], contents["count"])[span]], key] = kv_source_lookup(part, rank)(
            keys[key] - k_shift[spans["doc"][span]]
        )
        out = np.where((owners >= 0)[:, None, :] & held[None, :, None] & seen[None], owners[:, None, :], out)
    return out


def _samples(spans: np.ndarray, shift: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (index in `tokens`, index in `spans`) of each token in each span.

    Args:
        spans: records of dtype TOKEN_SPAN, in tokens of a part.
        shift: tokens of the plan minus tokens of the part, by document.
        tokens: tokens of the plan, ascending.
    """
    first, last = (np.searchsorted(tokens, spans[name] + shift[spans["doc"]]) for name in ("start", "stop"))
    return ragged_arange(first, last - first), np.repeat(np.arange(len(spans)), last - first)


def kv_source_lookup(plan: Plan, rank: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from tokens to the ranks from which their keys come to this rank, for a plan without parts.

    The ranks are those of `plan.kv_layout_compute`. Of several copies of a kv head, the source is the rank that
    exchanges messages with this rank.
    """
    items, connected = plan.forward.fetch.items, {rank}
    while True:
        is_connected = np.isin(items["src"], list(connected)) | np.isin(items["dst"], list(connected))
        extended = connected.union(items["src"][is_connected].tolist(), items["dst"][is_connected].tolist())
        if extended == connected:
            break
        connected = extended
    spans = plan.kv_layout_compute.spans
    spans = spans[np.isin(spans["rank"], list(connected))]
    spans = spans[np.argsort(spans["start"], kind="stable")]
    starts, ranks = spans["start"], spans["rank"]
    return lambda tokens: ranks[np.searchsorted(starts, tokens, "right") - 1]


def describe_arrivals(plan: Plan, rank: int, step: int) -> str:
    """Return what arrives during a step: "← 1,207 rows from rank 3"; empty for nothing."""
    part, part_step = plan.step_order()[step]
    items = plan.parts_or_self[part].forward.fetch.items
    arriving = items[(items["dst"] == rank) & (items["done"] == part_step)]
    sources = sorted(set(arriving["src"].tolist()))
    if not sources:
        return ""
    names = ", ".join(map(str, sources)) if len(sources) <= 3 else f"{sources[0]} .. {sources[-1]}"
    return f"← {format_count(arriving['rows'].sum())} rows from {'rank' if len(sources) == 1 else 'ranks'} {names}"


def _mean_run(owners: Sequence[np.ndarray]) -> float:
    """Return the mean length of horizontal runs of one colour, in pixels."""
    begins = pixels = 0
    for squares in owners:
        computed = squares >= 0
        pixels += int(computed.sum())
        begins += int((computed & (np.diff(squares, axis=2, prepend=-1) != 0)).sum())
    return pixels / max(begins, 1)


class _Page:
    """A figure with squares in rows and columns; places are inches from its upper left corner."""

    def __init__(self, summary: PlanSummary) -> None:
        self.rows, self.steps = summary.work.shape
        across = (MAX_WIDTH - 2 * MARGIN - NAMES - WORK) / max(self.steps, 1) / 1.08
        down = (MAX_HEIGHT - TOP - LEGEND) / self.rows
        self.has_captions = min(across, down - CAPTION) >= MIN_CAPTIONED_SQUARE
        square = max(MIN_SQUARE, min(MAX_SQUARE, across, (down - CAPTION * self.has_captions) / 1.08))
        self.pixels = round(square * DPI)
        self._gap = max(1, round(0.08 * self.pixels))
        self._line = self.pixels + self._gap + round(CAPTION * DPI) * self.has_captions
        self.square, self.pitch = self.pixels / DPI, self._line / DPI
        self._image = np.ones((self.rows * self._line, self.steps * (self.pixels + self._gap), 3))
        self.left = MARGIN + NAMES
        self.right = self.left_of(self.steps)
        self.width = max(self.right + WORK + MARGIN, 8.5)
        self.height = TOP + self.rows * self.pitch + LEGEND
        self.figure = new_figure(self.width, self.height, DPI)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))

    def text(self, x: float, y: float, text: str, size: float, **options: Any) -> None:
        """Write a text whose middle is at height `y`."""
        self.axes.text(x, y, drawn_text(text), fontsize=size, va="center", **options)

    def top_of(self, rank: int) -> float:
        """Return the upper edge of the squares of a rank."""
        return TOP + rank * self.pitch

    def left_of(self, step: int) -> float:
        """Return the left edge of the squares of a step."""
        return self.left + step * (self.pixels + self._gap) / DPI

    def fill_square(self, rank: int, step: int, image: np.ndarray) -> None:
        """Fill a square with an image [pixels, pixels, 3], or one colour [3], and draw its frame."""
        y, x = rank * self._line, step * (self.pixels + self._gap)
        square = self._image[y : y + self.pixels, x : x + self.pixels]
        square[:] = image
        if self.pixels >= 12:
            square[[0, -1]] = square[:, [0, -1]] = FRAME

    def show_squares(self) -> None:
        """Put the squares onto the page."""
        bottom = self.top_of(self.rows)
        if self._image.size:
            extent = (self.left, self.right, bottom, TOP)
            self.axes.imshow(self._image, extent=extent, aspect="auto", interpolation="nearest")
        self.axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        self.axes.set_axis_off()

    def caption(self, rank: int, step: int, text: str) -> None:
        """Write a caption below a square, as large as its width allows."""
        x, y = self.left_of(step) + self.square / 2, self.top_of(rank) + self.square + 0.085
        self.text(x, y, text, min(7.0, 118 * self.square / max(len(text), 1)), ha="center", color="0.35")

    def legend(self, notes: Sequence[str], palette: np.ndarray, is_shaded: bool) -> None:
        """Draw the meaning of the colours, then sentences, below the squares; the figure ends below them."""
        from matplotlib.patches import Rectangle

        y = self.top_of(self.rows) + 0.16
        colours = [(1 - share * 0.9, 1 - share * 0.7, 1 - share * 0.45) for share in (0, 0.5, 1)]
        for number, colour in enumerate(colours if is_shaded else [(GREY,) * 3, *palette[:3]]):
            box = (MARGIN + 0.16 * number, y - 0.07)
            self.axes.add_patch(Rectangle(box, 0.14, 0.14, facecolor=colour, edgecolor="0.6", linewidth=0.4))
        indent = 0.75
        for note in notes:
            for line in textwrap.wrap(note, int((self.width - 2 * MARGIN - indent) * 15)):
                self.text(MARGIN + indent, y, line, 8.5)
                y += 0.19
        self.figure.set_size_inches(self.width, y + 0.1)
        self.axes.set_ylim(y + 0.1, 0)


def _label(page: _Page, plan: Plan, summary: PlanSummary, palette: np.ndarray) -> None:
    """Write the title, the names of steps, and at each row the rank, what it holds, and its work."""
    nodes = f" ({plan.topology.nodes} nodes)" if plan.topology.nodes > 1 else ""
    title = f"{plan.algorithm}: {_describe_documents(summary)} over {plan.ranks} ranks{nodes}"
    page.text(MARGIN, 0.25, title, min(12.0, 105 * page.width / len(title)), weight="bold")
    page.text(
        MARGIN, 0.52, f"forward, {describe_attention(plan.attention)}; attention work of the slowest rank / mean: "
        f"{summary.imbalance:.3f}", 9,
    )  # fmt: skip
    for step in range(0, summary.steps, max(1, int(np.ceil(0.5 / (page.left_of(1) - page.left))))):
        page.text(page.left_of(step) + page.square / 2, TOP - 0.1, f"step {summary.labels[step]}", 8, ha="center")
    page.text(page.right + 0.05, TOP - 0.28, "work / mean", 8)
    work = summary.work.sum(1)
    stride = max(1, int(np.ceil(0.13 / page.pitch)))
    for rank in range(0, plan.ranks, stride):
        middle = page.top_of(rank) + page.square / 2
        size = min(9.5, 65 * page.pitch * stride)
        name = f"rank {rank}" + (f" (node {rank // plan.topology.ranks_per_node})" if plan.topology.nodes > 1 else "")
        room = page.square >= 0.5
        page.text(MARGIN + 0.18, middle - 0.16 * room, name, size, weight="bold")
        page.axes.plot([MARGIN + 0.06], [middle - 0.16 * room], "s", color=palette[rank], markersize=size * 0.7)
        if room:
            for line, text in enumerate(_describe_holding(plan, summary, rank)):
                page.text(MARGIN, middle + 0.03 + 0.17 * line, text, 8)
        page.text(page.right + 0.05, middle, f"{work[rank] / (work.mean() or 1):.2f}", min(8.5, size))


def _describe_documents(summary: PlanSummary) -> str:
    """Return "3 documents (700, 30, 4,100 tokens)"; in cross-attention with the numbers of queries and keys."""
    lengths, kv_lengths = summary.lengths, summary.kv_lengths
    is_crossed = kv_lengths is not lengths
    if 0 < len(lengths) <= 6:
        queries, keys = (", ".join(map(format_count, values)) for values in (lengths, kv_lengths))
        amount = f"{queries} queries; {keys} keys" if is_crossed else f"{queries} tokens"
        return f"1 document of {amount}" if len(lengths) == 1 else f"{len(lengths)} documents ({amount})"
    amount = f"{format_count(lengths.sum())} {'queries' if is_crossed else 'tokens'}"
    return f"{len(lengths):,} documents, {amount}" + (f" and {format_count(kv_lengths.sum())} keys" * is_crossed)


def _describe_holding(plan: Plan, summary: PlanSummary, rank: int) -> list[str]:
    """Return what a rank holds, its whole documents and its heads, a line each."""
    tokens = f"{format_count(summary.tokens[rank])} tokens"
    if summary.kv_lengths is not summary.lengths:
        tokens = f"{tokens[:-7]} queries, {format_count(plan.kv_layout_in.token_counts[rank])} keys"
    spans = plan.layout.rank_spans(rank)
    whole = int((spans["stop"] - spans["start"] == plan.documents.lengths[spans["doc"]]).sum())
    return [
        tokens,
        *([f"{whole:,} whole document{'s' * (whole > 1)}"] if whole and plan.ranks > 1 else []),
        *([f"heads {describe_heads(summary, rank)}"] if summary.splits_heads and not summary.parts else []),
    ]


def _notes(plan: Plan, summary: PlanSummary, is_shaded: bool) -> list[str]:
    after = ""
    if any(part.kv_redistribution is not None for part in plan.parts_or_self):
        after = " after the all-to-all"
    notes = [
        "grey: what the mask lets queries see; colour: what this rank computes in this step. The colour is that of the "
        f"rank that has these keys and values{after}.",
        "A square is the attention matrix of the whole batch: queries downwards, keys to the right. All squares have "
        f"one scale: coloured area {'times heads ' * summary.splits_heads}is work.",
    ]
    if is_shaded:
        notes = [
            "the darker, the more work of this rank in this step. Tiles would be smaller than pixels, so a square's "
            "shade is the work of all its tiles, and white is none."
        ]
    if plan.documents.trees is not None:
        notes.append("Documents of a tree that continue others see all of their tokens: rectangles below the diagonal.")
    if plan.documents.blocks is not None:
        notes.append("Squares over the diagonal: tokens of a block see each other both ways.")
    if summary.parts:
        names = "; ".join(f"{number} by {part.plan.algorithm}" for number, part in enumerate(summary.parts))
        notes.append(f"Steps are named part.step: documents are in parts that each go their own way ({names}).")
    if summary.splits_heads:
        notes.append("Ranks that exchange tokens for heads (all-to-all before and after the steps) compute the same "
                     "tokens, each for its own heads.")  # fmt: skip
    elif summary.has_redistribution:
        notes.append("Before and after the steps an all-to-all moves rows to where they are computed, and back.")
    return notes
