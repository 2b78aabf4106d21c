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
from mindspeed_cp.report.figure import new_figure
from mindspeed_cp.report.files import write_atomically
from mindspeed_cp.report.png_canvas import FIGURE_WIDTH, MARGIN, TIMELINE_COLOURS, Canvas
from mindspeed_cp.report.simulation.document_png import draw_document_spread, draw_longest_document
from mindspeed_cp.report.simulation.tables import conclusion
from mindspeed_cp.report.simulation.timeline_rows import draw_balance, draw_legend, draw_rank_names, draw_rows
from mindspeed_cp.report.simulation.trace import ranks_to_draw
from mindspeed_cp.report.text import describe_attention, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110

# Inches, as all places on the sheet.
HEADER_HEIGHT, OVERVIEW_ROW, TITLE_HEIGHT, AXIS_HEIGHT, LEGEND_HEIGHT = 0.86, 0.27, 0.6, 0.3, 0.62
NAME_COLUMN, TIME_COLUMN = 1.7, 8.2  # of the column of names, and of the bars and timelines
MAX_TIMELINE_HEIGHT, MAX_ROW_HEIGHT, MIN_PANEL_HEIGHT = 7.0, 0.16, 2.6


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
    drawn = list(dict.fromkeys((comparison.results[0], comparison.ring))) if shown is None else list(shown)
    rows = [len(ranks_to_draw(result.timeline)) for result in drawn]
    heights = [max(MIN_PANEL_HEIGHT, min(MAX_TIMELINE_HEIGHT, count * MAX_ROW_HEIGHT)) for count in rows]
    top = HEADER_HEIGHT + len(comparison.results) * OVERVIEW_ROW + AXIS_HEIGHT + LEGEND_HEIGHT
    height = top + sum(panel_height + TITLE_HEIGHT + AXIS_HEIGHT for panel_height in heights)
    figure = new_figure("the timeline", FIGURE_WIDTH, height, DPI)
    canvas = Canvas(figure, height)
    _overview(canvas, comparison)
    draw_legend(canvas, comparison.case.topology, top - LEGEND_HEIGHT + 0.17, True)
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
    bound = comparison.bound if len(comparison.case.batches) == 1 else None
    draw_rows(canvas.axes(MARGIN + NAME_COLUMN, begin, TIME_COLUMN, height), timeline, ranks, bound)
    draw_rank_names(canvas, timeline.plan.topology, ranks, MARGIN + NAME_COLUMN, begin, height)
    left = MARGIN + NAME_COLUMN + TIME_COLUMN + 0.25
    draw_balance(canvas.axes(left, begin, 1.35, height), timeline, ranks)
    canvas.text(left, begin - 0.09, "busy time, and the mean", 8, color="0.3")
    left += 1.35 + 0.35
    side = min(height - 1.15, FIGURE_WIDTH - left - MARGIN)
    draw_longest_document(canvas, canvas.axes(left, begin + 0.25, side, side), timeline, left, begin)
    draw_document_spread(canvas, timeline, left, begin + 0.25 + side + 0.2, FIGURE_WIDTH - left - MARGIN)
