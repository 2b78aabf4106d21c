"""What notebooks show of plans and simulations: tables in HTML with the plan's own numbers, and figures."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.report.notebook import pairs_of_ranks
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_shows_rows_and_pairs_of_its_ranks(algorithm: str) -> None:
    plan = build_plan(DOCUMENTS, Topology(2, 2), ATTENTION, algorithm)
    assert (pairs_of_ranks(plan) == plan.work().sum(1)).all()
    rows = Cells(plan._repr_html_()).rows
    assert ["algorithm", plan.algorithm] == [text.split(",")[0] for text in rows[0]]
    ranks = {row[0]: row[1:] for row in rows if len(row) == 6}
    counts = [int(ranks[str(rank)][0].replace(",", "")) for rank in range(4)]
    assert counts == plan.layout.token_counts.tolist()


def test_ranks_without_rows_many_ranks_and_hostile_names() -> None:
    assert Cells(build_plan(Documents([1]), Topology(1, 3), ATTENTION, "ring")._repr_html_()).rows
    large = build_plan(Documents([4096] * 8), Topology(8, 8), ATTENTION, "direct")._repr_html_()
    assert len(large) < 20_000 and "of 64)" in large
    hostile = replace(build_plan(DOCUMENTS, Topology(1, 2), ATTENTION, "ring"), algorithm="<script>alert(1)</script>")
    assert "<script>" not in hostile._repr_html_() and "&lt;script&gt;" in hostile._repr_html_()


def test_a_simulation_shows_its_times() -> None:
    timeline = simulate_plan(build_plan(DOCUMENTS, Topology(2, 2), ATTENTION, "ring"), load_cluster("a2"))
    text = timeline._repr_html_()
    assert Cells(text).rows[0] == ["algorithm", "ring"]
    assert f"{timeline.total * 1e3:,.4g} ms" in text and "modelled, not measured" in text
    assert f"{timeline.imbalance:.3f}" in text and "ms modelled" in repr(timeline)


def test_figures_belong_to_no_window() -> None:
    from matplotlib.figure import Figure

    plan = build_plan(DOCUMENTS, Topology(2, 2), ATTENTION, "hierarchical")
    timeline = simulate_plan(plan, load_cluster("a2"))
    for figure in (plan.plot(), timeline.plot(), timeline.plot(ranks=[3, 0])):
        assert isinstance(figure, Figure) and figure.axes
        figure.canvas.draw()
        assert np.asarray(figure.canvas.buffer_rgba()).std() > 0
    with pytest.raises(ConfigError, match=r"ranks of plot\(\) is or contains 4; valid: numbers from 0 to 3"):
        timeline.plot(ranks=[4])


def test_drawing_tools_are_imported_when_something_is_drawn() -> None:
    program = (
        "import sys; from mindspeed_cp import *; p = build_plan(Documents([9]), Topology(1, 2), AttentionConfig(2));"
        "p._repr_html_(); assert 'matplotlib' not in sys.modules; p.plot(); assert 'matplotlib' in sys.modules;"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
