"""What notebooks show of plans and simulations: tables in HTML with the plan's own numbers, and figures."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html import unescape

import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.choose import Candidate, SimulationCase, compare_algorithms
from mindspeed_cp.choose.compare import Comparison
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.report.notebook import draw, show
from mindspeed_cp.report.simulation import conclusion
from mindspeed_cp.simulate import simulate_plan

DOCUMENTS, ATTENTION = Documents([700, 3, 0, 90, 41]), AttentionConfig(4, 2, 16)


def lines_of(html: str) -> list[list[str]]:
    """Words of each line of the tables, which have no elements but one with styled text."""
    assert set(re.findall(r"</?(\w+)", html)) <= {"pre", "span"}, "notebooks load nothing from elsewhere"
    return [re.split(r" {2,}", line.strip()) for line in unescape(re.sub("<[^>]+>", "", html)).splitlines()]


def comparison() -> Comparison:
    layer = LayerCost.for_attention(ATTENTION)
    case = SimulationCase((DOCUMENTS,), Topology(2, 2, "a2"), ATTENTION, load_cluster("a2").with_ranks(2), layer)
    return compare_algorithms(case, [Candidate("direct")])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_shows_the_rows_of_its_ranks(algorithm: str) -> None:
    plan = build_plan(DOCUMENTS, Topology(2, 2), ATTENTION, algorithm)
    rows = lines_of(show(plan).html)
    assert ["algorithm", plan.algorithm] in rows
    heading = next(row for row in rows if row[0] == "rank")
    ranks = {row[0]: row for row in rows if len(row) == len(heading)}
    counts = [int(ranks[str(rank)][heading.index("tokens")].replace(",", "")) for rank in range(4)]
    assert counts == plan.layout.token_counts.tolist()


def test_ranks_without_rows_many_ranks_and_hostile_names() -> None:
    assert lines_of(show(build_plan(Documents([1]), Topology(1, 3), ATTENTION, "ring")).html)
    large = show(build_plan(Documents([4096] * 8), Topology(8, 16), ATTENTION, "direct")).html
    assert len(large) < 20_000 and "of 128)" in large
    hostile = replace(build_plan(DOCUMENTS, Topology(1, 2), ATTENTION, "ring"), algorithm="<script>alert(1)</script>")
    assert "<script>" not in show(hostile).html and "&lt;script&gt;" in show(hostile).html


def test_a_comparison_shows_its_conclusion_and_its_tables() -> None:
    compared = comparison()
    lines = lines_of(show(compared).html)
    words = " ".join(word for line in lines for word in line)
    assert {"ring", "direct"} <= {line[0] for line in lines} and conclusion(compared) in words


def test_pictures_are_png_files() -> None:
    plan = build_plan(DOCUMENTS, Topology(2, 2), ATTENTION, "hierarchical")
    timeline = simulate_plan(plan, load_cluster("a2"))
    for picture in (draw(plan), draw(timeline), draw(comparison())):
        assert picture._repr_png_().startswith(b"\x89PNG") and picture.figure.axes


def test_drawing_tools_are_imported_when_something_is_drawn() -> None:
    program = (
        "import sys; from mindspeed_cp import *; from mindspeed_cp.report.notebook import draw, show;"
        "p = build_plan(Documents([9]), Topology(1, 2), AttentionConfig(2)); show(p);"
        "assert 'matplotlib' not in sys.modules; draw(p); assert 'matplotlib' in sys.modules;"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_table_counts_trees_trajectories_and_blocks() -> None:
    documents = Documents([1300, 700, 100, 900, 2, 1, 2], [-1, 0, 0, 2, -1, 4, 4], [(20, 90), (310, 400)])
    html = show(build_plan(documents, Topology(1, 3), AttentionConfig(1), "ring")).html
    assert "2, up to 3 documents deep; as trajectories 4 documents, 4,307 tokens" in html
    assert "2, of 160 tokens that see both ways" in html
