"""The picture of a comparison: boxes as long as the times they stand for, words on the page."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.choose.compare import Comparison, SimulationCase, compare_algorithms
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.report.timelines import ROW_LIMIT, TIMELINE_COLOURS, comparison_figure, describe_sharing
from mindspeed_cp.report.trace_events import ranks_to_draw


def comparison(nodes: int = 2, per: int = 4, batches: int = 1, window: tuple[int, int] | None = None) -> Comparison:
    attention = AttentionConfig(8, 2, 64, window=window)
    cluster = load_cluster("a2").with_ranks(per)
    documents = [Documents([3000, 40, 900, 5200, 260]), Documents([2000])][:batches]
    problem = SimulationCase(
        tuple(documents), Topology(nodes, per, "a2"), attention, cluster, LayerCost.for_attention(attention)
    )
    return compare_algorithms(
        problem, [Candidate("hierarchical"), Candidate("ulysses"), Candidate("direct", (("layout", "balanced"),))]
    )


def widths(axes: Axes) -> dict[str, float]:
    """Sum of the widths of boxes by colour, in seconds."""
    out: dict[str, float] = {}
    names = {colour: name for name, (colour, _) in TIMELINE_COLOURS.items()}
    for boxes in axes.collections:
        if isinstance(boxes, PolyCollection) and len(boxes.get_paths()):
            name = names[to_hex(boxes.get_facecolor()[0])]
            width = sum(float(np.ptp(path.vertices[:, 0])) for path in boxes.get_paths())
            out[name] = out.get(name, 0.0) + width / 1e3
    return out


def test_boxes_of_a_timeline_have_the_widths_of_its_times() -> None:
    compared = comparison()
    for result in compared.results:
        figure = comparison_figure(compared, [result])
        timeline = result.timeline
        axes = figure.axes[1]
        drawn = widths(axes)
        assert axes.get_xlim()[1] == pytest.approx(timeline.total * 1e3)
        assert drawn["forward"] + drawn["backward"] == pytest.approx(timeline.compute.sum())
        assert drawn["linear"] == pytest.approx(timeline.linear.sum())
        assert drawn.get("exposed", 0.0) == pytest.approx(timeline.exposed.sum())
        assert drawn.get("late", 0.0) == pytest.approx((timeline.waiting - timeline.exposed).sum(), abs=1e-12)
        assert drawn.get("near", 0.0) + drawn.get("far", 0.0) > 0


def test_bars_of_all_algorithms_add_up_to_their_times() -> None:
    compared = comparison(batches=2)
    axes = comparison_figure(compared).axes[0]
    ends = sorted({round(bar.get_y(), 6): bar.get_x() + bar.get_width() for bar in axes.patches}.items())
    assert [end for _, end in ends] == pytest.approx([result.metrics.seconds * 1e3 for result in compared.results])
    assert axes.lines[0].get_xdata()[0] == pytest.approx(compared.bound * 1e3)


def test_timelines_have_one_scale_and_few_rows() -> None:
    compared = comparison(8, 8)
    figure = comparison_figure(compared)
    panels = figure.axes[1:]
    longest = max(result.timeline.total for result in (compared.results[0], compared.ring))
    assert len(panels) == 2 and {panel.get_xlim()[1] for panel in panels} == {longest * 1e3}
    timeline = compared.ring.timeline
    ranks = ranks_to_draw(timeline, ROW_LIMIT)
    assert len(ranks) <= 8 and int(timeline.waiting.argmax()) in ranks
    assert [label.get_text().split(",")[0] for label in panels[1].get_yticklabels()] == [f"rank {r}" for r in ranks]


@pytest.mark.parametrize("case", ["nodes", "one node", "window", "many ranks", "one rank"])
def test_words_stay_on_the_page_and_can_be_read_at_700_pixels(case: str) -> None:
    compared = {
        "nodes": lambda: comparison(batches=2),
        "one node": lambda: comparison(1, 8),
        "window": lambda: comparison(window=(300, 0)),
        "many ranks": lambda: comparison(8, 8),
        "one rank": lambda: comparison(1, 1),
    }[case]()
    figure = comparison_figure(compared)
    figure.canvas.draw()
    width, height = figure.get_size_inches() * figure.dpi
    ticks = [label for axes in figure.axes for label in axes.get_xticklabels()]  # some of them outside, not drawn
    words = [text for text in figure.findobj(Text) if text.get_text() and text not in ticks]
    assert len(words) > 20
    for text in words:
        box = text.get_window_extent()
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, text.get_text()
        assert text.get_fontsize() * figure.dpi / 72 * 700 / width >= 9


def test_sharing_counts_documents_of_ranks_and_nodes() -> None:
    def plan(lengths: list[int], topology: Topology, algorithm: str) -> str:
        return describe_sharing(build_plan(Documents(lengths), topology, AttentionConfig(8, 2, 64), algorithm))

    assert plan([3000, 40, 0, 900], Topology(2, 4, "a2"), "ring") == "documents: 3 shared by nodes"
    assert plan([3000, 40], Topology(1, 4), "ulysses") == "documents: 2 shared in a node"
    assert plan([5, 0], Topology(1, 1), "ring") == "documents: 1 whole on one rank"
    assert plan([0], Topology(1, 1), "ring") == "no documents"
