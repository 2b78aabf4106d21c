"""Rows of a timeline: for each rank its kernels, its waits and, in thin lines below, the messages that reach it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_cp.plan import Topology
from mindspeed_cp.plan.program import DIRECTIONS
from mindspeed_cp.report.png_canvas import MARGIN, TIMELINE_COLOURS, TIMELINE_LABELS, Canvas
from mindspeed_cp.report.simulation.messages import MessageBars
from mindspeed_cp.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KERNEL_SHARE = 0.58  # part of a row; the rest is for messages


def draw_rows(axes: Axes, timeline: Timeline, ranks: Sequence[int], bound: float | None) -> None:
    """Draw a row for each rank: kernels, waits and messages, and a line at the lower bound (seconds), if there is
    one."""
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
        has_internode = timeline.plan.topology.nodes > 1
        line_height = (0.92 - KERNEL_SHARE) / (2 if has_internode else 1)
        for far, colour_name in enumerate(("near", "far")):
            messages, down = bars[bars["far"] == far], KERNEL_SHARE + line_height * far
            begin, end = messages["begin"], messages["end"]
            _boxes(axes, colour_name, row[messages["rank"]], begin, end, down, line_height)
    all_rows, last = np.arange(len(ranks)), np.full(len(ranks), timeline.total)
    forward, backward = (timeline.steps(name)[list(ranks)] for name in DIRECTIONS)
    _boxes(axes, "linear", all_rows, forward[:, -1, 2], backward[:, 0, 0], 0, KERNEL_SHARE)
    _boxes(axes, "late", all_rows, backward[:, -1, 2], last, 0, KERNEL_SHARE)
    if bound is not None:
        axes.axvline(bound * 1e3, color=TIMELINE_COLOURS["bound"], linewidth=1.8)
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


def draw_rank_names(
    canvas: Canvas, topology: Topology, ranks: Sequence[int], left: float, begin: float, height: float
) -> None:
    """Write nodes and ranks at the left of rows that begin at `left`."""
    row_height, ranks_per_node = height / len(ranks), topology.ranks_per_node
    stride = max(1, int(np.ceil(0.13 / row_height)))
    for index in range(0, len(ranks), stride):
        middle = begin + (index + 0.45) * row_height
        canvas.text(left - 0.08, middle, str(ranks[index]), 7.5, ha="right", color="0.3")
    for node in range(topology.nodes):
        indices = [index for index, rank in enumerate(ranks) if rank // ranks_per_node == node]
        if indices and topology.nodes > 1 and len(indices) * row_height > 0.15:
            middle = begin + (indices[0] + indices[-1] + 1) / 2 * row_height
            canvas.text(left - 0.5, middle, f"node {node}", 8.5, ha="right", color="0.3")


def draw_balance(axes: Axes, timeline: Timeline, ranks: Sequence[int]) -> None:
    """Draw a bar for each rank: its busy time over the mean."""
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


def draw_legend(canvas: Canvas, topology: Topology, top: float, has_bound: bool) -> None:
    """Draw the meanings of the colours, in two lines."""
    from matplotlib.patches import Patch

    is_shown = {"far": topology.nodes > 1, "bound": has_bound}
    named = [name for name in TIMELINE_LABELS if is_shown.get(name, True)]
    handles = [Patch(color=TIMELINE_COLOURS[name], label=TIMELINE_LABELS[name]) for name in named]
    canvas.figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(MARGIN / canvas.width, 1 - top / canvas.height), ncols=4,
        fontsize=9, frameon=False, handlelength=1.2, borderaxespad=0, columnspacing=2.2,
    )  # fmt: skip
