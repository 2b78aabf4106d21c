"""Tile map: which rank computes which pairs when, as a picture of a plan's forward.

A row for each rank, a square for each step. A square is the attention matrix of the whole batch, queries downwards and
keys to the right. Grey is what the mask makes visible, colour is what the rank computes in the step; the colour is
that of the rank that holds the keys and values (after the redistribution, if there is one). All squares have one
scale, so that area is work::

                       step 0        step 1     work / mean
    rank 0             |◣   |        |    |     0.98
    1,200 tokens       |   ◣|        |■   |

Squares are sampled: a pixel stands for the pair of tokens at its centre. If documents or chunks are smaller than
pixels, each square is shaded by its work instead. Bars at the right are each rank's work and tokens over their means.
Of many ranks and steps evenly spaced ones are drawn, so that the picture fits a screen.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.plan import Plan
from mindspeed_cp.report.files import drawn_text, new_figure, rank_colours
from mindspeed_cp.report.plan import PlanSummary, describe_heads
from mindspeed_cp.report.text import describe_attention, format_count, format_lengths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
MAX_WIDTH, MAX_HEIGHT, MAX_SQUARE, MIN_SQUARE = 1300, 760, 190, 5  # pixels of all squares together, and of one
MIN_FRAMED_SQUARE, MIN_DESCRIBED_SQUARE = 12, 75  # pixels
MAX_RANKS, MAX_STEPS, SPACED_RANKS = 48, 64, 32  # of the picture; of more ranks so many are drawn
MIN_BARS, MAX_BARS, MAX_BAR = 160, 380, 12  # pixels: width of the bars' axis, height of a bar
MIN_RUN_PIXELS = 3.0  # squares are shaded if coloured runs are shorter on average
GREY, FRAME = 0.88, 0.6
WORK_COLOUR, TOKEN_COLOUR = "#4c7fc4", "#c9ccd1"


def tile_map(summary: PlanSummary) -> Figure:
    """Return the picture of a plan's forward. Raises ConfigError if matplotlib is not installed."""
    plan = summary.plan
    ranks, steps = _drawn(summary)
    side = max(MIN_SQUARE, min(MAX_SQUARE, MAX_WIDTH // max(len(steps), 1), MAX_HEIGHT // len(ranks)) * 92 // 100)
    pitch = side + max(1, side // 12)
    queries, keys = (
        (np.arange(side) * 2 + 1) * documents.tokens // (2 * side) for documents in (plan.documents, plan.kv_documents)
    )
    seen = visible(plan, queries, keys)
    owners = [computed_squares(plan, rank, queries, keys, seen)[steps] for rank in ranks]
    is_shaded = bool(summary.work.any()) and _mean_run(owners) < MIN_RUN_PIXELS
    palette = np.array(rank_colours(plan.ranks))
    image = np.ones((len(ranks) * pitch, max(len(steps), 1) * pitch, 3))
    for row, rank in enumerate(ranks):
        for column, step in enumerate(steps):
            square = image[row * pitch :, column * pitch :][:side, :side]
            if is_shaded:
                square[:] = 1 - summary.work[rank, step] / summary.work.max() * np.array([0.9, 0.7, 0.45])
            else:
                square[seen] = GREY
                owner = owners[row][column]
                square[owner >= 0] = palette[owner[owner >= 0]]
            if side >= MIN_FRAMED_SQUARE:
                square[[0, -1]] = square[:, [0, -1]] = FRAME
    return _figure(summary, ranks, steps, image, side, pitch, palette, is_shaded)


def _drawn(summary: PlanSummary) -> tuple[list[int], list[int]]:
    """Return the ranks and the steps that are drawn: all, or of many evenly spaced ones and the rank with most work."""
    ranks, steps = summary.work.shape
    spaced = range(0, ranks, 1 if ranks <= MAX_RANKS else -(-ranks // SPACED_RANKS))
    drawn_steps = np.unique(np.linspace(0, steps - 1, min(steps, MAX_STEPS)).round().astype(int)).tolist()
    return sorted({*spaced, int(summary.work.sum(1).argmax())}), drawn_steps


def _figure(
    summary: PlanSummary,
    ranks: list[int],
    steps: list[int],
    image: np.ndarray,
    side: int,
    pitch: int,
    palette: np.ndarray,
    is_shaded: bool,
) -> Figure:
    """Return the image with the title, the names of steps, at each row the rank, what it holds and its work, and the
    meaning of the colours."""
    plan, width = summary.plan, max((image.shape[1] + MIN_BARS) / DPI + 3.4, 8.5)
    nodes = f" ({plan.topology.nodes} nodes)" if plan.topology.nodes > 1 else ""
    lengths, kv_lengths = plan.documents.lengths, plan.kv_documents.lengths
    keys = "" if kv_lengths is lengths else f"; their keys: {format_lengths(kv_lengths)}"
    title = f"{plan.algorithm} over {plan.ranks} ranks{nodes}; documents: {format_lengths(lengths)}{keys}"
    imbalance = f"attention work of the slowest rank / mean: {summary.imbalance:.3f}"
    titles = [
        *textwrap.wrap(drawn_text(title), int(width * 11)),
        *textwrap.wrap(f"forward, {describe_attention(plan.attention)}; {imbalance}", int(width * 11)),
    ]
    notes = [
        line
        for note in [*_left_out(summary, ranks, steps), *_notes(summary, is_shaded)]
        for line in textwrap.wrap(note, int(width * 14.5))
    ]
    height = image.shape[0] / DPI + 0.2 * len(titles) + 0.16 * len(notes) + 0.7
    figure = new_figure(width, height, DPI, layout="constrained")
    figure.suptitle("\n".join(titles), x=0.01, ha="left", fontsize=10, weight="bold")
    figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=8.5)
    axes = figure.subplots()
    axes.imshow(image, interpolation="nearest")
    axes.set_anchor("W")
    for spine in axes.spines.values():
        spine.set_visible(False)
    columns = range(0, len(steps), -(-DPI // (2 * pitch)))
    axes.set_xticks([i * pitch + side / 2 for i in columns], [f"step {summary.labels[steps[i]]}" for i in columns])
    axes.tick_params(length=0, labelsize=8, top=True, labeltop=True, bottom=False, labelbottom=False)
    centres = np.arange(len(ranks)) * pitch + side / 2
    is_described = side >= MIN_DESCRIBED_SQUARE
    axes.set_yticks(centres, [_describe_rank(summary, rank, is_described) for rank in ranks])
    for rank, label in zip(ranks, axes.get_yticklabels(), strict=True):
        label.set(color=palette[rank] * 0.85, weight="bold")
    free, thick = min(width * DPI - image.shape[1] - 3.4 * DPI, MAX_BARS), min(0.4 * side, MAX_BAR)
    bars = axes.inset_axes((1 + 0.55 * DPI / image.shape[1], 0.0, free / image.shape[1], 1.0))
    for name, values, colour, shift in (
        ("work / mean", summary.work.sum(1), WORK_COLOUR, -0.5),
        ("tokens / mean", plan.layout.token_counts, TOKEN_COLOUR, 0.5),
    ):
        shares = values[ranks] / (values.mean() or 1)
        bars.barh(centres + shift * thick, shares, thick, color=colour, label=name)
        if name == "work / mean":
            bars.set_yticks(centres, [f"{share:.2f}" for share in shares])
    bars.set_ylim(image.shape[0], 0)
    bars.axvline(1.0, color="0.3", linewidth=0.8)
    bars.set_xticks([0, 1])
    bars.tick_params(length=0, labelsize=8, top=False, labelbottom=False)
    bars.spines[["top", "right", "bottom"]].set_visible(False)
    bars.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, frameon=False, borderaxespad=0.2,
                columnspacing=1.0, handlelength=1.0)  # fmt: skip
    return figure


def _left_out(summary: PlanSummary, ranks: list[int], steps: list[int]) -> list[str]:
    """Return notes on ranks and steps that are not drawn."""
    notes, of_ranks, of_steps = [], summary.plan.ranks, len(summary.labels)
    if len(ranks) < of_ranks:
        most = int(summary.work.sum(1).argmax())
        spacing = ranks[1] - ranks[0] if ranks[1] != most else ranks[2] - ranks[0]
        notes.append(f"Drawn are {len(ranks)} of {of_ranks:,} ranks, {spacing} apart, and rank {most}, with most work.")
    if len(steps) < of_steps:
        notes.append(f"Drawn are {len(steps)} of {of_steps:,} steps.")
    return notes


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
    source, target = np.divmod(np.unique(items["src"].astype(np.int64) * plan.ranks + items["dst"]), plan.ranks)
    while True:
        is_connected = np.isin(source, list(connected)) | np.isin(target, list(connected))
        extended = connected.union(source[is_connected].tolist(), target[is_connected].tolist())
        if extended == connected:
            break
        connected = extended
    spans = plan.kv_layout_compute.spans
    spans = spans[np.isin(spans["rank"], list(connected))]
    spans = spans[np.argsort(spans["start"], kind="stable")]
    starts, ranks = spans["start"], spans["rank"]
    return lambda tokens: ranks[np.searchsorted(starts, tokens, "right") - 1]


def _mean_run(owners: Sequence[np.ndarray]) -> float:
    """Return the mean length of horizontal runs of one colour, in pixels."""
    begins = pixels = 0
    for squares in owners:
        computed = squares >= 0
        pixels += int(computed.sum())
        begins += int((computed & (np.diff(squares, axis=2, prepend=-1) != 0)).sum())
    return pixels / max(begins, 1)


def _describe_rank(summary: PlanSummary, rank: int, is_long: bool) -> str:
    """Return the name of a rank and, if it may be long, what it holds, a line each."""
    plan = summary.plan
    name = f"rank {rank}" + (f" (node {rank // plan.topology.ranks_per_node})" if plan.topology.nodes > 1 else "")
    if not is_long:
        return name
    tokens = f"{format_count(plan.layout.token_counts[rank])} tokens"
    if plan.kv_documents.lengths is not plan.documents.lengths:
        tokens = f"{tokens[:-7]} queries, {format_count(plan.kv_layout_in.token_counts[rank])} keys"
    spans = plan.layout.rank_spans(rank)
    whole = int((spans["stop"] - spans["start"] == plan.documents.lengths[spans["doc"]]).sum())
    lines = [name, tokens]
    lines += [f"{whole:,} whole document{'s' * (whole > 1)}"] if whole and plan.ranks > 1 else []
    lines += [f"heads {describe_heads(summary, rank)}"] if summary.splits_heads and not summary.parts else []
    return "\n".join(lines)


def _notes(summary: PlanSummary, is_shaded: bool) -> list[str]:
    plan = summary.plan
    moves_keys = any(part.kv_redistribution is not None for part in plan.parts_or_self)
    notes = [
        "Grey: what the mask lets queries see; colour: what this rank computes in this step. The colour is that of the "
        f"rank that has these keys and values{' after the all-to-all' * moves_keys}.",
        "A square is the attention matrix of the whole batch: queries downwards, keys to the right. All squares have "
        f"one scale: coloured area {'times heads ' * summary.splits_heads}is work.",
    ]
    if is_shaded:
        notes = [
            "The darker, the more work of this rank in this step. Tiles would be smaller than pixels, so a square's "
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
    return notes
