"""A comparison as a picture: the parts of the time of each algorithm, then timelines, balance and tiles of some of
them.

    algorithm    |attention |linear     |exposed      |  ms, times the even ring, of the bound      one bar each
    hierarchical |==========|===========|=|

    ring: 136.5 ms a layer ...
    rank 0   |██▒▒██▒▒░░░░░░░░████▒▒|   busy |█████     the longest document:
    rank 1   |██▒▒██▒▒░░░░░░░░████▒▒|        |█████     who computes which tile

A row of a timeline has the kernels of a rank and, in red, its waits. The thin lines below are the messages that it
receives from its own node and from other nodes: messages below kernels are hidden, messages below red are exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_cp.choose.compare import AlgorithmResult, Comparison
from mindspeed_cp.plan import Topology
from mindspeed_cp.plan.program import DIRECTIONS
from mindspeed_cp.report.files import write_atomically
from mindspeed_cp.report.png_canvas import FIGURE_WIDTH, MARGIN, TIMELINE_COLOURS, TIMELINE_LABELS, Canvas
from mindspeed_cp.report.simulation.document_png import draw_document_spread, draw_longest_document
from mindspeed_cp.report.simulation.messages import MessageBars
from mindspeed_cp.report.simulation.tables import conclusion
from mindspeed_cp.report.simulation.trace import ranks_to_draw
from mindspeed_cp.report.text import describe_attention, format_bytes
from mindspeed_cp.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110

# Inches, as all places on the sheet.
HEADER_HEIGHT, OVERVIEW_ROW, TITLE_HEIGHT, AXIS_HEIGHT, LEGEND_HEIGHT = 0.86, 0.27, 0.6, 0.3, 0.62
NAME_COLUMN, TIME_COLUMN = 1.7, 8.2  # of the column of names, and of the bars and timelines
MAX_TIMELINE_HEIGHT, MAX_ROW_HEIGHT, MIN_PANEL_HEIGHT = 7.0, 0.16, 2.6

KERNEL_SHARE = 0.58  # part of a row; the rest is for messages


def draw_timelines(comparison: Comparison, path: str | Path, shown: Sequence[AlgorithmResult] | None = None) -> Path:
    """Write the picture to a PNG file.

    Args:
        comparison: simulated algorithms.
        path: file to write.
        shown: algorithms whose timelines are drawn; default: the fastest and the even ring.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = timeline_figure(comparison, shown)
    return write_atomically("--png", path, lambda new: figure.savefig(new, dpi=DPI, format="png"))


def timeline_figure(comparison: Comparison, shown: Sequence[AlgorithmResult] | None = None) -> Figure:
    """Return the picture as a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = list(dict.fromkeys((comparison.results[0], comparison.ring))) if shown is None else list(shown)
    rows = [len(ranks_to_draw(result.timeline)) for result in drawn]
    heights = [max(MIN_PANEL_HEIGHT, min(MAX_TIMELINE_HEIGHT, count * MAX_ROW_HEIGHT)) for count in rows]
    top = HEADER_HEIGHT + len(comparison.results) * OVERVIEW_ROW + AXIS_HEIGHT + LEGEND_HEIGHT
    height = top + sum(panel_height + TITLE_HEIGHT + AXIS_HEIGHT for panel_height in heights)
    figure = Figure(figsize=(FIGURE_WIDTH, height), dpi=DPI)
    FigureCanvasAgg(figure)
    figure.patch.set_facecolor("white")
    canvas = Canvas(figure, height)
    _overview(canvas, comparison)
    _legend(canvas, comparison, top - LEGEND_HEIGHT + 0.17)
    for result, panel_height in zip(drawn, heights, strict=True):
        _panel(canvas, comparison, result, top, panel_height)
        top += panel_height + TITLE_HEIGHT + AXIS_HEIGHT
    return figure


def _overview(canvas: Canvas, comparison: Comparison) -> None:
    """Draw the header and one bar for each algorithm."""
    case = comparison.case
    batch, batch_count = case.batches[0], len(case.batches)
    topology, attention = case.topology, case.attention
    nodes = f"{topology.nodes} x {topology.ranks_per_node} of {case.cluster.name}"
    title = f"One layer, forward and backward, modelled: {topology.ranks} ranks, {nodes}"
    canvas.text(MARGIN, 0.22, title, 13, weight="bold")
    batch_note = f"means of {batch_count} batches, the first with " if batch_count > 1 else ""
    subtitle = (
        f"{batch_note}{len(batch):,} documents, {batch.tokens:,} tokens; {attention.heads} heads ({attention.kv_heads} "
        f"of keys and values) of {attention.head_dim} channels, {describe_attention(attention)}"
    )
    canvas.text(MARGIN, 0.45, subtitle, 9, color="0.35")
    sentence = conclusion(comparison)
    canvas.text(MARGIN, 0.7, sentence, min(10.5, 1900 / len(sentence)), weight="bold")
    results = comparison.results
    axes = canvas.axes(MARGIN + NAME_COLUMN, HEADER_HEIGHT, TIME_COLUMN, len(results) * OVERVIEW_ROW)
    longest = max(result.metrics.seconds for result in results) * 1e3
    axes.set(xlim=(0, longest * 1.02), ylim=(len(results), 0))
    axes.set_yticks([])
    axes.xaxis.set_major_formatter("{x:g} ms")
    for row, result in enumerate(results):
        left, metrics = 0.0, result.metrics
        times = result.timeline.steps_forward[:, result.timeline.is_attention("forward")]
        forward = np.diff(times[:, :, :2], axis=2).sum() / result.timeline.compute.sum()
        parts = {
            "forward": metrics.attention * forward,
            "linear": metrics.linear,
            "backward": metrics.attention * (1 - forward),
            "exposed": metrics.exposed,
            "late": metrics.late,
        }
        for name, seconds in parts.items():
            axes.barh(row + 0.5, seconds * 1e3, 0.74, left, color=TIMELINE_COLOURS[name])
            left += seconds * 1e3
        middle = HEADER_HEIGHT + (row + 0.5) * OVERVIEW_ROW
        canvas.text(MARGIN + NAME_COLUMN - 0.12, middle, result.name, min(9.5, 200 / len(result.name)), ha="right")
        cells = (
            f"{comparison.ms(metrics.seconds)} ms",
            f"{metrics.speedup:.2f} x even ring",
            f"{100 * metrics.fraction:.0f} % of the bound",
            f"{format_bytes(metrics.sent)} sent",
        )
        for column, words in enumerate(cells):
            canvas.text(MARGIN + NAME_COLUMN + TIME_COLUMN + 1.0 + 1.2 * column, middle, words, 8.5, ha="right")
    axes.axvline(comparison.bound * 1e3, color=TIMELINE_COLOURS["bound"], linewidth=1.8)


def _panel(canvas: Canvas, comparison: Comparison, result: AlgorithmResult, top: float, height: float) -> None:
    """Draw timeline, balance and tiles of one algorithm."""
    timeline, metrics = result.timeline, result.metrics
    ranks = ranks_to_draw(timeline)
    middle = top + 0.26
    cause = f", and most of the waiting is for {metrics.waiting_causes[0][0]}" if metrics.waiting_causes else ""
    first = "the first batch, " if len(comparison.case.batches) > 1 else ""
    omitted = f"; {len(ranks)} of {timeline.ranks} ranks are drawn" if len(ranks) < timeline.ranks else ""
    busy = 100 * float((timeline.compute + timeline.linear).mean()) / timeline.total
    end = canvas.text(MARGIN, middle, result.name, 12, weight="bold")
    caption = f"{first}{comparison.ms(timeline.total)} ms: ranks compute {busy:.0f} % of the time{cause}{omitted}"
    canvas.text(max(MARGIN + NAME_COLUMN, end + 0.2), middle, caption, 9.5)
    begin = top + TITLE_HEIGHT - 0.12
    _timeline(canvas.axes(MARGIN + NAME_COLUMN, begin, TIME_COLUMN, height), comparison, timeline, ranks)
    _names(canvas, timeline.plan.topology, ranks, begin, height)
    left = MARGIN + NAME_COLUMN + TIME_COLUMN + 0.25
    _balance(canvas.axes(left, begin, 1.35, height), timeline, ranks)
    canvas.text(left, begin - 0.09, "busy time, and the mean", 8, color="0.3")
    left += 1.35 + 0.35
    side = min(height - 1.15, FIGURE_WIDTH - left - MARGIN)
    draw_longest_document(canvas, canvas.axes(left, begin + 0.25, side, side), timeline, left, begin)
    draw_document_spread(canvas, timeline, left, begin + 0.25 + side + 0.2, FIGURE_WIDTH - left - MARGIN)


def _timeline(axes: Axes, comparison: Comparison, timeline: Timeline, ranks: Sequence[int]) -> None:
    axes.set(xlim=(0, timeline.total * 1e3), ylim=(len(ranks), 0))
    axes.set_yticks([])
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:g} ms")
    row = np.full(timeline.ranks, -1)
    row[list(ranks)] = np.arange(len(ranks))
    for name in DIRECTIONS:
        times = timeline.steps(name)[list(ranks)]
        rows = np.broadcast_to(np.arange(len(ranks))[:, None], times.shape[:2])
        is_attention = timeline.is_attention(name)
        for colour, columns in ((name, is_attention), ("linear", ~is_attention)):
            _boxes(axes, colour, rows[:, columns], times[:, columns, 0], times[:, columns, 1], 0, KERNEL_SHARE)
        _boxes(axes, "exposed", rows, times[:, :, 1], times[:, :, 2], 0, KERNEL_SHARE)
        bars = MessageBars(timeline, name, "dst").bars
        bars = bars[row[bars["rank"]] >= 0]
        has_internode = comparison.case.topology.nodes > 1
        line_height = (0.92 - KERNEL_SHARE) / (2 if has_internode else 1)
        for far, colour_name in enumerate(("near", "far")):
            messages, down = bars[bars["far"] == far], KERNEL_SHARE + line_height * far
            begin, end = messages["begin"], messages["end"]
            _boxes(axes, colour_name, row[messages["rank"]], begin, end, down, line_height)
    all_rows, last = np.arange(len(ranks)), np.full(len(ranks), timeline.total)
    forward, backward = (timeline.steps(name)[list(ranks)] for name in DIRECTIONS)
    _boxes(axes, "linear", all_rows, forward[:, -1, 2], backward[:, 0, 0], 0, KERNEL_SHARE)
    _boxes(axes, "late", all_rows, backward[:, -1, 2], last, 0, KERNEL_SHARE)
    if len(comparison.case.batches) == 1:
        axes.axvline(comparison.bound * 1e3, color=TIMELINE_COLOURS["bound"], linewidth=1.8)
    ranks_per_node = timeline.plan.topology.ranks_per_node
    for border in (i for i in range(1, len(ranks)) if ranks[i] // ranks_per_node != ranks[i - 1] // ranks_per_node):
        axes.axhline(border - 0.04, color="0.55", linewidth=0.7)


def _boxes(
    axes: Axes, name: str, row: np.ndarray, begin: np.ndarray, end: np.ndarray, down: float, height: float
) -> None:
    """Draw rectangles from `begin` to `end` (seconds), `down` below the top of their rows."""
    from matplotlib.collections import PolyCollection

    row, begin, end = (np.asarray(values, np.float64).ravel() for values in (row, begin, end))
    is_visible = end > begin
    x0, x1, y0 = begin[is_visible] * 1e3, end[is_visible] * 1e3, row[is_visible] + down
    corners = np.stack([np.stack([x0, x1, x1, x0], 1), np.stack([y0, y0, y0 + height, y0 + height], 1)], 2)
    axes.add_collection(PolyCollection(list(corners), facecolors=TIMELINE_COLOURS[name], linewidths=0), autolim=False)


def _names(canvas: Canvas, topology: Topology, ranks: Sequence[int], begin: float, height: float) -> None:
    """Write nodes and ranks at the left of a timeline."""
    row_height, ranks_per_node = height / len(ranks), topology.ranks_per_node
    stride = max(1, int(np.ceil(0.13 / row_height)))
    for index in range(0, len(ranks), stride):
        middle = begin + (index + 0.45) * row_height
        canvas.text(MARGIN + NAME_COLUMN - 0.08, middle, str(ranks[index]), 7.5, ha="right", color="0.3")
    for node in range(topology.nodes):
        indices = [index for index, rank in enumerate(ranks) if rank // ranks_per_node == node]
        if indices and topology.nodes > 1 and len(indices) * row_height > 0.15:
            middle = begin + (indices[0] + indices[-1] + 1) / 2 * row_height
            canvas.text(MARGIN + NAME_COLUMN - 0.5, middle, f"node {node}", 8.5, ha="right", color="0.3")


def _balance(axes: Axes, timeline: Timeline, ranks: Sequence[int]) -> None:
    busy = timeline.compute + timeline.linear
    mean, drawn_ranks, rows = busy.mean(), list(ranks), np.arange(len(ranks)) + KERNEL_SHARE / 2
    axes.set(xlim=(0, max(float(busy.max()) / mean * 1.25, 1.3)), ylim=(len(drawn_ranks), 0))
    axes.set_axis_off()
    axes.barh(rows, timeline.compute[drawn_ranks] / mean, 0.75, color=TIMELINE_COLOURS["forward"])
    linear, left = timeline.linear[drawn_ranks] / mean, timeline.compute[drawn_ranks] / mean
    axes.barh(rows, linear, 0.75, left, color=TIMELINE_COLOURS["linear"])
    axes.axvline(1, color="black", linewidth=0.9)
    if len(drawn_ranks) <= 40:
        for row, rank in zip(rows, drawn_ranks, strict=True):
            share = float(busy[rank]) / mean
            axes.text(max(share, 1) + 0.04, row, f"{share:.2f}", fontsize=6.5, va="center")


def _legend(canvas: Canvas, comparison: Comparison, top: float) -> None:
    from matplotlib.patches import Patch

    named = [name for name in TIMELINE_LABELS if name != "far" or comparison.case.topology.nodes > 1]
    handles = [Patch(color=TIMELINE_COLOURS[name], label=TIMELINE_LABELS[name]) for name in named]
    canvas.figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(MARGIN / FIGURE_WIDTH, 1 - top / canvas.height), ncols=4,
        fontsize=9, frameon=False, handlelength=1.2, borderaxespad=0, columnspacing=2.2,
    )  # fmt: skip
