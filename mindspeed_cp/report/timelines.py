"""Pictures of simulated layers: the parts of the time of each algorithm, then timelines of some of them on one scale.

    hierarchical |=====|                    24.9 ms, 5.66 x
    ring         |=====|=======|=========|  141 ms, 1.00 x      one bar each

    hierarchical: ranks compute 97 % of the time                busy / mean
    rank 0   |██▒▒██|                                           0.98
    ring: ranks compute 33 % of the time
    rank 0   |██▒▒██▒▒░░░░░░░░████▒▒|                           1.00

A row of a timeline has the kernels of a rank and, in red, its waits. The thin lines below are the messages that it
receives from its own node and from other nodes: messages below kernels are hidden, messages below red are exposed.
The picture can be read at a width of 700 pixels, so a timeline has few rows; the trace has all ranks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_cp.choose.compare import AlgorithmResult, Comparison
from mindspeed_cp.cluster import ComputeCost
from mindspeed_cp.cluster.compute import balanced_lower_bound
from mindspeed_cp.plan import Plan
from mindspeed_cp.report.files import drawn_text, new_figure
from mindspeed_cp.report.simulation import conclusion
from mindspeed_cp.report.text import format_count
from mindspeed_cp.report.trace_events import ranks_to_draw, timeline_events
from mindspeed_cp.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 9.0, 155  # 1,395 pixels: letters of 9 points are 10 pixels high where the picture is 700 wide
SMALL, NORMAL, LARGE = 9.0, 10.0, 12.0  # points
ROW = 0.24  # inches
ROW_LIMIT = 8  # ranks of a timeline
KERNEL_SHARE = 0.6  # of the height of a row; messages are below

#: Meanings of colours by name.
TIMELINE_COLOURS = {
    "forward": ("#4c7fc4", "attention, forward"),
    "backward": ("#27497c", "attention, backward"),
    "linear": ("#a9bfd9", "linear layers"),
    "exposed": ("#e0483e", "waits for messages"),
    "late": ("#f3c4bd", "waits for the slowest rank"),
    "near": ("#e6a323", "messages from its node"),
    "far": ("#8d55b8", "messages from other nodes"),
    "bound": ("#2b8a57", "bound: perfect balance, nothing exposed"),
}


def comparison_figure(comparison: Comparison, shown: Sequence[AlgorithmResult] | None = None) -> Figure:
    """Return the picture of a comparison.

    Args:
        comparison: simulated algorithms.
        shown: algorithms whose timelines are drawn; default: the fastest and the even ring.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    drawn = list(dict.fromkeys((comparison.results[0], comparison.ring))) if shown is None else list(shown)
    ranks = [ranks_to_draw(result.timeline, ROW_LIMIT) for result in drawn]
    case = comparison.case
    batch, topology = case.batches[0], case.topology
    several = f"{len(case.batches)} batches, the first with " if len(case.batches) > 1 else ""
    lines = [
        f"{topology.ranks} ranks ({topology.nodes} x {topology.ranks_per_node} of {case.cluster.name}); {several}"
        f"{len(batch):,} documents, {format_count(batch.tokens)} tokens. One layer, forward and backward, modelled.",
        *textwrap.wrap(conclusion(comparison), 105),
    ]
    axes = _panels(lines, [len(comparison.results), *map(len, ranks)], topology.nodes > 1)
    _draw_bars(axes[0], comparison)
    longest = max(result.timeline.total for result in drawn)
    bound = comparison.bound if len(case.batches) == 1 else None
    for panel, result, rows in zip(axes[1:], drawn, ranks, strict=True):
        name = result.name + ", the first batch" * bool(several)
        _draw_timeline(panel, result.timeline, name, rows, longest, bound)
    return axes[0].get_figure(root=True)  # type: ignore[return-value]


def timeline_figure(timeline: Timeline) -> Figure:
    """Return the picture of one simulated layer."""
    plan, shown = timeline.plan, ranks_to_draw(timeline, ROW_LIMIT)
    topology, cost = plan.topology, ComputeCost(timeline.cluster, plan.attention, timeline.layer)
    bound = balanced_lower_bound(plan.documents, plan.ranks, cost, plan.kv_documents)
    where = f"{topology.ranks} ranks ({topology.nodes} x {topology.ranks_per_node} of {timeline.cluster.name})"
    line = f"{where}. One layer, forward and backward, modelled: {timeline.total * 1e3:,.4g} ms"
    (axes,) = _panels([line], [len(shown)], topology.nodes > 1)
    _draw_timeline(axes, timeline, plan.algorithm, shown, timeline.total, bound)
    return axes.get_figure(root=True)  # type: ignore[return-value]


def describe_sharing(plan: Plan) -> str:
    """Return how many documents one rank, ranks of one node, and ranks of several nodes compute: "101 documents whole
    on one rank, 9 shared in a node"."""
    ranks, nodes = np.zeros((2, len(plan.documents)), np.int64)
    for part in plan.parts_or_self:
        layout = part.q_layout_compute
        busy = layout.head_counts(part.attention.heads) > 0
        spans = layout.spans[busy[layout.spans["rank"]]]
        for count, group in ((ranks, spans["rank"]), (nodes, spans["rank"] // plan.topology.ranks_per_node)):
            count += np.bincount(np.unique(spans["doc"] * layout.ranks + group) // layout.ranks, minlength=len(count))
    counts = {
        "whole on one rank": ranks == 1,
        "shared in a node": (ranks > 1) & (nodes == 1),
        "shared by nodes": nodes > 1,
    }
    texts = [f"{int(mask.sum()):,} {how}" for how, mask in counts.items() if mask.any()]
    return f"documents: {', '.join(texts)}" if texts else "no documents"


def _panels(lines: Sequence[str], rows: Sequence[int], has_nodes: bool) -> list[Axes]:
    """Return axes below each other, with so many rows each, below lines of text and above the meanings of colours."""
    from matplotlib.patches import Patch

    height = 0.2 * len(lines) + 0.75 + sum(ROW * max(count, 2) + 0.75 for count in rows)
    figure = new_figure(WIDTH, height, DPI, layout="constrained")
    figure.suptitle(drawn_text("\n".join(lines), 1000), x=0.01, ha="left", fontsize=NORMAL)
    axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=[max(count, 2) for count in rows])[:, 0]
    for panel, count in zip(axes, rows, strict=True):
        panel.set(ylim=(count, 0))
        for side in panel.spines.values():
            side.set_visible(False)
        panel.tick_params(length=0, labelsize=SMALL)
        panel.xaxis.set_major_formatter("{x:g} ms")
        panel.grid(axis="x", color="0.9", linewidth=0.6)
        panel.set_axisbelow(True)
    handles = [Patch(color=colour, label=label) for name, (colour, label) in TIMELINE_COLOURS.items()
               if has_nodes or name != "far"]  # fmt: skip
    figure.legend(
        handles=handles, loc="outside lower left", ncols=3, fontsize=SMALL, frameon=False, handlelength=1.2,
        columnspacing=1.5,
    )  # fmt: skip
    return list(axes)


def _draw_bars(axes: Axes, comparison: Comparison) -> None:
    """Draw a bar for each algorithm, made of the parts of its time."""
    for row, result in enumerate(comparison.results):
        left, metrics = 0.0, result.metrics
        times = result.timeline.steps_forward[:, result.timeline.is_attention("forward")]
        forward = np.diff(times[:, :, :2], axis=2).sum() / (result.timeline.compute.sum() or 1)
        parts = {
            "forward": metrics.attention * forward,
            "linear": metrics.linear,
            "backward": metrics.attention * (1 - forward),
            "exposed": metrics.exposed,
            "late": metrics.late,
        }
        for name, seconds in parts.items():
            axes.barh(row + 0.5, seconds * 1e3, 0.74, left, color=TIMELINE_COLOURS[name][0])
            left += seconds * 1e3
        text = f" {comparison.ms(metrics.seconds)} ms, {metrics.speedup:.2f} x the even ring"
        axes.text(left, row + 0.5, text, va="center", fontsize=SMALL)
    longest = max(result.metrics.seconds for result in comparison.results)
    axes.set_xlim(0, longest * 1e3 * 1.42)  # room for the texts
    names = [drawn_text(result.name, 28) for result in comparison.results]
    axes.set_yticks(np.arange(len(names)) + 0.5, names)
    axes.axvline(comparison.bound * 1e3, color=TIMELINE_COLOURS["bound"][0], linewidth=1.8)


def _draw_timeline(
    axes: Axes, timeline: Timeline, name: str, ranks: Sequence[int], seconds: float, bound: float | None
) -> None:
    """Draw a row for each rank: kernels, waits and messages; and a line at the lower bound, if there is one.

    Args:
        axes: gets the rows.
        timeline: a simulated layer.
        name: title of the rows.
        ranks: ranks to draw, ascending.
        seconds: end of the axis of time.
        bound: lower bound, seconds.
    """
    from matplotlib.collections import PolyCollection

    busy = timeline.compute + timeline.linear
    omitted = f"; {len(ranks)} of {timeline.ranks} ranks" if len(ranks) < timeline.ranks else ""
    share = 100 * float(busy.mean()) / (timeline.total or 1)
    title = f"{drawn_text(name, 40)}: {timeline.total * 1e3:,.4g} ms, ranks compute {share:.0f} % of the time{omitted}"
    axes.set_title(title, loc="left", fontsize=NORMAL, weight="bold")
    axes.set_xlabel(describe_sharing(timeline.plan), loc="left", fontsize=SMALL)
    axes.set_xlim(0, seconds * 1e3 or 1)
    boxes: dict[str, list[tuple[tuple[float, float], ...]]] = {}
    for event in timeline_events(timeline, ranks):
        top, bottom = 0.0, KERNEL_SHARE
        colour = {"wait": "exposed", "attention": event.name.split()[-1]}.get(event.category, event.category)
        if event.thread == "receive":
            colour = "far" if event.details["between"] == "nodes" else "near"
            top = KERNEL_SHARE + (0.19 if colour == "far" else 0.04)
            bottom = top + 0.13
        if event.thread != "send":
            (x0, x1), row = (event.start * 1e3, (event.start + event.seconds) * 1e3), ranks.index(event.rank)
            corners = (x0, row + top), (x1, row + top), (x1, row + bottom), (x0, row + bottom)
            boxes.setdefault(colour, []).append(corners)
    for colour, rectangles in boxes.items():
        collection = PolyCollection(rectangles, facecolors=TIMELINE_COLOURS[colour][0], linewidths=0)
        collection.set_in_layout(False)  # inside the axes
        axes.add_collection(collection, autolim=False)
    if bound is not None:
        axes.axvline(bound * 1e3, color=TIMELINE_COLOURS["bound"][0], linewidth=1.8)
    per_node, nodes = timeline.plan.topology.ranks_per_node, timeline.plan.topology.nodes
    names = [f"rank {rank}" + (f", node {rank // per_node}" if nodes > 1 else "") for rank in ranks]
    axes.set_yticks(np.arange(len(ranks)) + KERNEL_SHARE / 2, names)
    for row, value in enumerate(busy[list(ranks)] / (busy.mean() or 1)):
        axes.text(1.005, row + KERNEL_SHARE / 2, f"{value:.2f}", fontsize=SMALL, va="center",
                  transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_title("busy / mean", loc="right", fontsize=SMALL, color="0.3")
