"""Draw the picture of the README: the timelines of a ring and of hierarchical placement for one batch, on one scale.

    python docs/examples/ring_beside_hierarchical.py docs/img/ring_beside_hierarchical.png

One layer, forward and backward, of a packed batch with the lengths of Wikipedia on 4 nodes of Atlas 800T A2, drawn for
one rank of each node. All times are modelled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, simulate_plan
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.simulate.timeline import Timeline

TOPOLOGY = Topology(nodes=4, ranks_per_node=8, cluster="a2")
ATTENTION = AttentionConfig(heads=32, kv_heads=8, head_dim=128)
DOCUMENTS = Documents(sample_batch("wikipedia", 4096 * TOPOLOGY.ranks, seed=0))
COLOURS = {"attention": "#2f66b0", "linear layers": "#a9c4e4", "waiting for other ranks": "#e0483e"}
ALGORITHMS = {
    "ring": "every document is cut over all {ranks} ranks",
    "hierarchical": "a document is cut only where that pays",
}


def periods(timeline: Timeline, rank: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield kind, begin and end (seconds) of what a rank does in one layer."""
    forward, backward = (timeline.steps(direction)[rank] for direction in ("forward", "backward"))
    for direction, steps in (("forward", forward), ("backward", backward)):
        is_attention = timeline.is_attention(direction)
        yield "attention", steps[is_attention, 0], steps[is_attention, 1]
        yield "linear layers", steps[~is_attention, 0], steps[~is_attention, 1]
        yield "waiting for other ranks", steps[:, 1], steps[:, 2]
    yield "linear layers", forward[-1:, 2], backward[:1, 0]
    yield "waiting for other ranks", backward[-1:, 2], np.array([timeline.total])


def draw(axes: Axes, name: str, timeline: Timeline) -> None:
    """Draw one row for the first rank of each node."""
    for node in range(TOPOLOGY.nodes):
        for kind, begin, end in periods(timeline, node * TOPOLOGY.ranks_per_node):
            spans = np.stack([begin, end - begin], axis=1) * 1e3
            axes.broken_barh(spans, (node + 0.1, 0.8), facecolors=COLOURS[kind], linewidth=0)
    title = f"{name}, {timeline.total * 1e3:.0f} ms: {ALGORITHMS[name].format(ranks=TOPOLOGY.ranks)}"
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylim(TOPOLOGY.nodes, 0)
    axes.set_yticks(np.arange(TOPOLOGY.nodes) + 0.5, [f"node {node}" for node in range(TOPOLOGY.nodes)])
    axes.tick_params(length=0, labelsize=10)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def main(path: str) -> None:
    """Simulate both algorithms and write the picture."""
    plans = {name: build_plan(DOCUMENTS, TOPOLOGY, ATTENTION, name) for name in ALGORITHMS}
    timelines = {name: simulate_plan(plan, "a2") for name, plan in plans.items()}
    figure, panels = plt.subplots(2, 1, figsize=(7, 4.2), sharex=True, layout="constrained")
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        draw(axes, name, timeline)
    panels[-1].xaxis.set_major_formatter("{x:g} ms")
    panels[-1].set_xlim(0, max(timeline.total for timeline in timelines.values()) * 1e3)
    ring, placed = timelines.values()
    faster = f"{ring.total / placed.total:.1f} times as fast"
    panels[-1].text(placed.total * 1e3 + 3, TOPOLOGY.nodes / 2, faster, fontsize=11)
    figure.suptitle(
        f"One layer, forward and backward, of {len(DOCUMENTS)} documents on {TOPOLOGY.ranks} NPUs (modelled)",
        x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=10, frameon=False, handlelength=1.2)
    figure.savefig(path, dpi=200)
    print({name: f"{timeline.total * 1e3:.2f} ms" for name, timeline in timelines.items()})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ring_beside_hierarchical.png")
