"""What notebooks show of plans and simulations: tables in HTML with the plan's own numbers, and figures."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.choose import Candidate, SimulationCase, compare_algorithms
from mindspeed_cp.choose.compare import Comparison
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.report.notebook import draw, show
from mindspeed_cp.report.simulation import conclusion
from mindspeed_cp.simulate import simulate_plan

DOCUMENTS, ATTENTION = Documents([700, 3, 0, 90, 41]), AttentionConfig(4, 2, 16)


class Cells(HTMLParser):
    """Rows of texts of all tables, and whether every element is closed in its order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag not in ("script", "link", "img", "iframe"), "notebooks load nothing from elsewhere"
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def comparison() -> Comparison:
    layer = LayerCost.for_attention(ATTENTION)
    case = SimulationCase((DOCUMENTS,), Topology(2, 2, "a2"), ATTENTION, load_cluster("a2").with_ranks(2), layer)
    return compare_algorithms(case, [Candidate("direct")])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_shows_the_rows_of_its_ranks(algorithm: str) -> None:
    plan = build_plan(DOCUMENTS, Topology(2, 2), ATTENTION, algorithm)
    rows = Cells(show(plan).html).rows
    assert rows[0] == ["algorithm", plan.algorithm]
    heading = next(row for row in rows if row[0] == "rank")
    ranks = {row[0]: row for row in rows if len(row) == len(heading)}
    counts = [int(ranks[str(rank)][heading.index("tokens")].replace(",", "")) for rank in range(4)]
    assert counts == plan.layout.token_counts.tolist()


def test_ranks_without_rows_many_ranks_and_hostile_names() -> None:
    assert Cells(show(build_plan(Documents([1]), Topology(1, 3), ATTENTION, "ring")).html).rows
    large = show(build_plan(Documents([4096] * 8), Topology(8, 16), ATTENTION, "direct")).html
    assert len(large) < 20_000 and "of 128)" in large
    hostile = replace(build_plan(DOCUMENTS, Topology(1, 2), ATTENTION, "ring"), algorithm="<script>alert(1)</script>")
    assert "<script>" not in show(hostile).html and "&lt;script&gt;" in show(hostile).html


def test_a_simulation_shows_its_times() -> None:
    timeline = simulate_plan(build_plan(DOCUMENTS, Topology(2, 2), ATTENTION, "ring"), load_cluster("a2"))
    text = show(timeline).html
    assert Cells(text).rows[0] == ["algorithm", "ring"]
    assert f"{timeline.total * 1e3:,.4g} ms" in text and "modelled, not measured" in text
    assert f"{timeline.imbalance:.3f}" in text


def test_a_comparison_shows_its_conclusion_and_its_tables() -> None:
    compared = comparison()
    text = show(compared).html
    assert {"ring", "direct"} <= {row[0] for row in Cells(text).rows} and conclusion(compared) in text


def test_pictures_are_png_files_and_ranks_are_those_of_a_simulation() -> None:
    plan = build_plan(DOCUMENTS, Topology(2, 2), ATTENTION, "hierarchical")
    timeline = simulate_plan(plan, load_cluster("a2"))
    for picture in (draw(plan), draw(timeline), draw(timeline, ranks=[3, 0]), draw(comparison())):
        assert picture._repr_png_().startswith(b"\x89PNG") and picture.figure.axes
    for ranks, value in (([4], "4"), ([], "empty")):
        with pytest.raises(ConfigError, match=f"ranks to draw: is or contains {value}; valid: numbers from 0 to 3"):
            draw(timeline, ranks=ranks)
    with pytest.raises(ConfigError, match=r"ranks to draw: is \[0\] for a Plan; valid: None"):
        draw(plan, ranks=[0])


def test_drawing_tools_are_imported_when_something_is_drawn() -> None:
    program = (
        "import sys; from mindspeed_cp import *; from mindspeed_cp.report.notebook import draw, show;"
        "p = build_plan(Documents([9]), Topology(1, 2), AttentionConfig(2)); show(p);"
        "assert 'matplotlib' not in sys.modules; draw(p); assert 'matplotlib' in sys.modules;"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
