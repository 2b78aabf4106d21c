"""The picture of a comparison: boxes as long as the times they stand for, words on the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology
from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.choose.compare import Comparison, SimulationCase, compare_algorithms
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.report.png_canvas import TIMELINE_COLOURS
from mindspeed_cp.report.simulation.document_png import node_rank_colour
from mindspeed_cp.report.simulation.timeline_png import draw_timelines, timeline_figure


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
    names = {colour: name for name, colour in TIMELINE_COLOURS.items()}
    for boxes in axes.collections:
        if isinstance(boxes, PolyCollection) and len(boxes.get_paths()):
            name = names[to_hex(boxes.get_facecolor()[0])]
            width = sum(float(np.ptp(path.vertices[:, 0])) for path in boxes.get_paths())
            out[name] = out.get(name, 0.0) + width / 1e3
    return out


def test_boxes_of_a_timeline_have_the_widths_of_its_times() -> None:
    compared = comparison()
    for result in compared.results:
        figure = timeline_figure(compared, [result])
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
    axes = timeline_figure(compared).axes[0]
    ends = sorted({round(bar.get_y(), 6): bar.get_x() + bar.get_width() for bar in axes.patches}.items())
    assert [end for _, end in ends] == pytest.approx([result.metrics.seconds * 1e3 for result in compared.results])
    assert axes.lines[0].get_xdata()[0] == pytest.approx(compared.bound * 1e3)


@pytest.mark.parametrize(
    "case",
    ["nodes", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("one node", "window")), "many ranks", "one rank"],
)
def test_words_stay_on_the_page_and_off_each_other(case: str) -> None:
    colours = {
        "nodes": lambda: comparison(batches=2),
        "one node": lambda: comparison(1, 8),
        "window": lambda: comparison(window=(300, 0)),
        "many ranks": lambda: comparison(8, 8),
        "one rank": lambda: comparison(1, 1),
    }[case]()
    figure = timeline_figure(colours)
    figure.canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in figure.texts if text.get_text()]
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
    for index, (text, box) in enumerate(boxes):
        for other, there in boxes[index + 1 :]:
            across = min(box.x1, there.x1) - max(box.x0, there.x0)
            down = min(box.y1, there.y1) - max(box.y0, there.y0)
            assert across < 1 or down < 2, f"{text!r} over {other!r}"


def test_ranks_have_colours_of_their_own() -> None:
    for topology in (Topology(1, 16), Topology(4, 8), Topology(8, 8)):
        assert len({to_hex(node_rank_colour(rank, topology)) for rank in range(topology.ranks)}) == topology.ranks


def test_the_picture_is_a_png_and_a_bad_place_is_one_line(tmp_path: Path) -> None:
    compared = comparison()
    path = draw_timelines(compared, tmp_path / "out.png", [compared.ring])
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--png .*: cannot be written: "):
        draw_timelines(compared, tmp_path / "none" / "out.png")
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]
