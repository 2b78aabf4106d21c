"""A comparison as a picture: what each algorithm's layer is made of, then timelines, balance and tiles of some of them.

    algorithm    |attention |linear     |exposed      |  ms, times the even ring, of the bound      one bar each
    hierarchical |==========|===========|=|

    ring: 136.5 ms a layer ...
    rank 0   |██▒▒██▒▒░░░░░░░░████▒▒|   busy |█████     the longest document:
    rank 1   |██▒▒██▒▒░░░░░░░░████▒▒|        |█████     who computes which tile

A row of a timeline has a rank's kernels and, in red, its waits; below them, thin, the messages that reach it from its
own node and from others: above kernels they are hidden, above red they are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_cp.cost.timeline import Timeline
from mindspeed_cp.plan import Topology
from mindspeed_cp.report.document_png import draw_spread, draw_tiles
from mindspeed_cp.report.files import write_file
from mindspeed_cp.report.messages import Bars
from mindspeed_cp.report.recorded import DIRECTIONS, shown_ranks
from mindspeed_cp.report.sheet import COLOURS, MARGIN, MEANINGS, WIDTH, Sheet
from mindspeed_cp.report.simulated import Comparison, Simulated
from mindspeed_cp.report.text import attention_text, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110

# Inches, as all places on the sheet.
ROW_OF_ALL, TITLE, AXIS, GAP, LEGEND = 0.27, 0.6, 0.3, 0.0, 0.62
NAMES, TIMES = 1.7, 8.2  # of the column of names, and of the bars and timelines
TALLEST, LARGEST_ROW, LEAST = 7.0, 0.16, 2.6  # of a timeline; of one row of it; least of a panel

KERNELS = 0.58  # part of a row; the rest is for messages


def draw_timelines(
    comparison: Comparison, path: str | Path, shown: Sequence[Simulated] | None = None, switch: str = "--png"
) -> Path:
    """Write the picture to a PNG file.

    Args:
        comparison: what it shows.
        path: file to write.
        shown: the algorithms whose timelines are drawn; default: the fastest and the even ring.
        switch: what asked for it, for the error.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = timelines(comparison, shown)
    return write_file(switch, path, lambda aside: figure.savefig(aside, dpi=DPI, format="png"))


def timelines(comparison: Comparison, shown: Sequence[Simulated] | None = None) -> Figure:
    """The picture as a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wanted = list(dict.fromkeys((comparison.simulated[0], comparison.ring))) if shown is None else list(shown)
    heights = [_height(len(shown_ranks(one.timeline))) for one in wanted]
    top = TITLE + len(comparison.simulated) * ROW_OF_ALL + AXIS + LEGEND
    height = top + sum(high + TITLE + AXIS + GAP for high in heights) + GAP
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    FigureCanvasAgg(figure)
    figure.patch.set_facecolor("white")
    page = Sheet(figure, height)
    _all(page, comparison)
    _legend(page, comparison, top - LEGEND + 0.17)
    for one, high in zip(wanted, heights, strict=True):
        _panel(page, comparison, one, top, high)
        top += high + TITLE + AXIS + GAP
    return figure


def _height(ranks: int) -> float:
    return max(LEAST, min(TALLEST, ranks * LARGEST_ROW))


def _all(page: Sheet, comparison: Comparison) -> None:
    """One bar for each algorithm."""
    problem = comparison.problem
    batch, many = problem.batches[0], len(problem.batches)
    topology, attention = problem.topology, problem.attention
    page.text(
        MARGIN,
        0.22,
        f"One layer, forward and backward, modelled: {topology.ranks} ranks, {topology.nodes} x "
        f"{topology.ranks_per_node} of {problem.cluster.name}",
        13,
        weight="bold",
    )
    of = f"means of {many} batches, the first with " if many > 1 else ""
    page.text(
        MARGIN,
        0.45,
        f"{of}{len(batch):,} documents, {batch.tokens:,} tokens; {attention.heads} heads ({attention.kv_heads} of keys "
        f"and values) of {attention.head_dim} channels, {attention_text(attention)}",
        9,
        color="0.35",
    )
    some = comparison.simulated
    axes = page.axes(MARGIN + NAMES, TITLE, TIMES, len(some) * ROW_OF_ALL)
    longest = max(one.figures.seconds for one in some) * 1e3
    axes.set(xlim=(0, longest * 1.02), ylim=(len(some), 0))
    axes.set_yticks([])
    axes.xaxis.set_major_formatter("{x:g} ms")
    for row, one in enumerate(some):
        left, figures = 0.0, one.figures
        turns = one.timeline.forward[:, one.timeline.is_attention("forward")]
        forward = np.diff(turns[:, :, :2], axis=2).sum() / one.timeline.compute.sum()
        parts = {
            "forward": figures.attention * forward,
            "linear": figures.linear,
            "backward": figures.attention * (1 - forward),
            "exposed": figures.exposed,
            "late": figures.late,
        }
        for name, seconds in parts.items():
            axes.barh(row + 0.5, seconds * 1e3, 0.74, left, color=COLOURS[name])
            left += seconds * 1e3
        middle = TITLE + (row + 0.5) * ROW_OF_ALL
        page.text(MARGIN + NAMES - 0.12, middle, one.name, min(9.5, 200 / len(one.name)), ha="right")
        said = (
            f"{comparison.ms(figures.seconds)} ms",
            f"{figures.speedup:.2f} x even ring",
            f"{100 * figures.fraction:.0f} % of the bound",
            f"{size(figures.sent)} sent",
        )
        for column, words in enumerate(said):
            page.text(MARGIN + NAMES + TIMES + 1.0 + 1.2 * column, middle, words, 8.5, ha="right")
    axes.axvline(comparison.bound * 1e3, color=COLOURS["bound"], linewidth=1.8)


def _panel(page: Sheet, comparison: Comparison, one: Simulated, top: float, high: float) -> None:
    """Timeline, balance and tiles of one algorithm."""
    timeline, figures = one.timeline, one.figures
    ranks = shown_ranks(timeline)
    middle = top + 0.26
    why = f", and most of the waiting is for {figures.causes[0][0]}" if figures.causes else ""
    first = "the first batch, " if len(comparison.problem.batches) > 1 else ""
    some = f"; {len(ranks)} of {timeline.ranks} ranks are drawn" if len(ranks) < timeline.ranks else ""
    busy = 100 * float((timeline.compute + timeline.linear).mean()) / timeline.total
    end = page.text(MARGIN, middle, one.name, 12, weight="bold")
    page.text(
        max(MARGIN + NAMES, end + 0.2),
        middle,
        f"{first}{comparison.ms(timeline.total)} ms: ranks compute {busy:.0f} % of the time{why}{some}",
        9.5,
    )
    begin = top + TITLE - 0.12
    _timeline(page.axes(MARGIN + NAMES, begin, TIMES, high), comparison, timeline, ranks)
    _names(page, timeline.plan.topology, ranks, begin, high)
    left = MARGIN + NAMES + TIMES + 0.25
    _balance(page.axes(left, begin, 1.35, high), timeline, ranks)
    page.text(left, begin - 0.09, "busy time, and the mean", 8, color="0.3")
    left += 1.35 + 0.35
    side = min(high - 1.15, WIDTH - left - MARGIN)
    draw_tiles(page, page.axes(left, begin + 0.25, side, side), timeline, left, begin)
    draw_spread(page, timeline, left, begin + 0.25 + side + 0.2, WIDTH - left - MARGIN)


def _timeline(axes: Axes, comparison: Comparison, timeline: Timeline, ranks: Sequence[int]) -> None:
    axes.set(xlim=(0, timeline.total * 1e3), ylim=(len(ranks), 0))
    axes.set_yticks([])
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:g} ms")
    row = np.full(timeline.ranks, -1)
    row[list(ranks)] = np.arange(len(ranks))
    for name, turns in zip(DIRECTIONS, (timeline.forward, timeline.backward), strict=True):
        some = turns[list(ranks)]
        where = np.broadcast_to(np.arange(len(ranks))[:, None], some.shape[:2])
        own = timeline.is_attention(name)
        for colour, of in ((name, own), ("linear", ~own)):
            _boxes(axes, colour, where[:, of], some[:, of, 0], some[:, of, 1], 0, KERNELS)
        _boxes(axes, "exposed", where, some[:, :, 1], some[:, :, 2], 0, KERNELS)
        bars = Bars.of(timeline, name, "dst").bars
        bars = bars[row[bars["rank"]] >= 0]
        two = comparison.problem.topology.nodes > 1
        each = (0.92 - KERNELS) / (2 if two else 1)
        for far, shade in enumerate(("near", "far")):
            mine = bars[bars["far"] == far]
            _boxes(axes, shade, row[mine["rank"]], mine["begin"], mine["end"], KERNELS + each * far, each)
    at, every = np.arange(len(ranks)), np.asarray(ranks)
    _boxes(axes, "linear", at, timeline.forward[every, -1, 2], timeline.backward[every, 0, 0], 0, KERNELS)
    last = np.full(len(ranks), timeline.total)
    _boxes(axes, "late", at, timeline.backward[every, -1, 2], last, 0, KERNELS)
    if len(comparison.problem.batches) == 1:
        axes.axvline(comparison.bound * 1e3, color=COLOURS["bound"], linewidth=1.8)
    per = timeline.plan.topology.ranks_per_node
    for border in (i for i in range(1, len(ranks)) if ranks[i] // per != ranks[i - 1] // per):
        axes.axhline(border - 0.04, color="0.55", linewidth=0.7)


def _boxes(
    axes: Axes, name: str, row: np.ndarray, begin: np.ndarray, end: np.ndarray, down: float, high: float
) -> None:
    """Rectangles from `begin` to `end` (seconds), `down` below the top of their rows."""
    from matplotlib.collections import PolyCollection

    row, begin, end = (np.asarray(values, np.float64).ravel() for values in (row, begin, end))
    real = end > begin
    x0, x1, y0 = begin[real] * 1e3, end[real] * 1e3, row[real] + down
    corners = np.stack([np.stack([x0, x1, x1, x0], 1), np.stack([y0, y0, y0 + high, y0 + high], 1)], 2)
    axes.add_collection(PolyCollection(list(corners), facecolors=COLOURS[name], linewidths=0), autolim=False)


def _names(page: Sheet, topology: Topology, ranks: Sequence[int], begin: float, high: float) -> None:
    """Nodes and ranks at the left of a timeline."""
    each, per = high / len(ranks), topology.ranks_per_node
    every = max(1, int(np.ceil(0.13 / each)))
    for index in range(0, len(ranks), every):
        page.text(MARGIN + NAMES - 0.08, begin + (index + 0.45) * each, str(ranks[index]), 7.5, ha="right", color="0.3")
    for node in range(topology.nodes):
        mine = [index for index, rank in enumerate(ranks) if rank // per == node]
        if mine and topology.nodes > 1 and len(mine) * each > 0.15:
            middle = begin + (mine[0] + mine[-1] + 1) / 2 * each
            page.text(MARGIN + NAMES - 0.5, middle, f"node {node}", 8.5, ha="right", color="0.3")


def _balance(axes: Axes, timeline: Timeline, ranks: Sequence[int]) -> None:
    busy = timeline.compute + timeline.linear
    mean, some, at = busy.mean(), list(ranks), np.arange(len(ranks)) + KERNELS / 2
    axes.set(xlim=(0, max(float(busy.max()) / mean * 1.25, 1.3)), ylim=(len(some), 0))
    axes.set_axis_off()
    axes.barh(at, timeline.compute[some] / mean, 0.75, color=COLOURS["forward"])
    axes.barh(at, timeline.linear[some] / mean, 0.75, timeline.compute[some] / mean, color=COLOURS["linear"])
    axes.axvline(1, color="black", linewidth=0.9)
    if len(some) <= 40:
        for place, rank in zip(at, some, strict=True):
            axes.text(
                max(float(busy[rank]) / mean, 1) + 0.04, place, f"{busy[rank] / mean:.2f}", fontsize=6.5, va="center"
            )


def _legend(page: Sheet, comparison: Comparison, top: float) -> None:
    from matplotlib.patches import Patch

    named = [name for name in MEANINGS if name != "far" or comparison.problem.topology.nodes > 1]
    handles = [Patch(color=COLOURS[name], label=MEANINGS[name]) for name in named]
    page.figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(MARGIN / WIDTH, 1 - top / page.height), ncols=4, fontsize=9,
        frameon=False, handlelength=1.2, borderaxespad=0, columnspacing=2.2,
    )  # fmt: skip
