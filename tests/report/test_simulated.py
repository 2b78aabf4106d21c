"""Algorithms compared by simulation: figures, the even ring, refusals, what ranks wait for."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.cost import LayerCost, load_cluster
from mindspeed_cp.cost.simulate import simulate
from mindspeed_cp.plan.hierarchical import choose
from mindspeed_cp.report.simulated import Comparison, Problem, Wanted, compare
from mindspeed_cp.report.waits import causes, waits

BATCHES = (Documents([3000, 40, 900, 5200, 0, 260]), Documents([8000, 100]))


def problem(nodes: int = 2, per: int = 4, batches: tuple[Documents, ...] = BATCHES) -> Problem:
    attention = AttentionConfig(8, 2, 64)
    cluster = load_cluster("a2").with_ranks(per)
    return Problem(batches, Topology(nodes, per, "a2"), attention, cluster, LayerCost.like(attention))


def comparison(*names: str) -> Comparison:
    return compare(problem(), [Wanted(name) for name in names])


def test_figures_are_means_of_the_batches_and_the_fastest_is_first() -> None:
    found = comparison("ulysses", "direct", "hierarchical")
    where = problem()
    assert [one.figures.seconds for one in found.simulated] == sorted(one.figures.seconds for one in found.simulated)
    assert {one.name for one in found.simulated} == {"ring", "ulysses", "direct", "hierarchical"}
    for one in found.simulated:
        each = [
            simulate(build_plan(batch, where.topology, where.attention, one.name), where.cluster, where.layer)
            for batch in BATCHES
        ]
        figures = one.figures
        assert figures.seconds == pytest.approx(np.mean([t.total for t in each]))
        assert figures.exposed == pytest.approx(np.mean([t.exposed.mean() for t in each]))
        assert figures.hidden == pytest.approx(np.mean([t.hidden.mean() for t in each]))
        assert figures.sent == pytest.approx(np.mean([t.bytes_sent.mean() for t in each]))
        assert figures.sent_most == max(t.bytes_sent.max() for t in each)
        assert figures.memory == max(t.memory.max() for t in each)
        # A rank computes, waits for messages or waits for the others: nothing else, and nothing twice.
        assert figures.compute + figures.exposed + figures.late == pytest.approx(figures.seconds)
        assert one.timeline.total == each[0].total


def test_speed_and_bound_are_ratios_of_times() -> None:
    found = comparison("hierarchical", "ring")
    where = problem()
    bounds = [choose(batch, batch, where.topology, where.attention).bound for batch in BATCHES]
    assert found.bound == pytest.approx(np.mean(bounds))
    assert found.ring.figures.speedup == 1.0
    for one in found.simulated:
        assert one.figures.speedup == pytest.approx(found.ring.figures.seconds / one.figures.seconds)
        assert 0 < one.figures.fraction == pytest.approx(found.bound / one.figures.seconds)
        assert one.figures.fraction <= 1


def test_the_even_ring_is_there_though_nobody_asked_and_only_once() -> None:
    assert [one.name for one in comparison("ring", "ring").simulated] == ["ring"]
    found = compare(problem(), [Wanted("ring", {"layout": "balanced"})])
    assert {one.name for one in found.simulated} == {"ring", "ring, layout=balanced"}
    assert found.ring.name == "ring" and found.named("ring, layout=balanced") is not None
    assert found.named("ulysses") is None


def test_what_cannot_run_is_told_with_its_reason_and_the_others_run() -> None:
    wanted = [Wanted("hierarchical", {"max_seqlen_per_dp_cp_rank": 100}), Wanted("hybrid", {"ulysses_degree": 3})]
    found = compare(problem(), [*wanted, Wanted("direct")])
    assert {one.name for one in found.simulated} == {"ring", "direct"}
    reasons = {one.name: one.reason for one in found.refused}
    assert "max_seqlen_per_dp_cp_rank = 100" in reasons["hierarchical, max_seqlen_per_dp_cp_rank=100"]
    assert "ulysses_degree is 3" in reasons["hybrid, ulysses_degree=3"]


def test_sizes_of_the_model_reach_the_plan_and_stay_out_of_the_name() -> None:
    wanted = Wanted("hierarchical", {}, {"hidden_size": 0})
    assert wanted.name == "hierarchical"
    assert "hidden_size is 0" in compare(problem(), [wanted]).refused[0].reason


def test_batches_without_a_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="the batch has no tokens"):
        compare(problem(batches=(Documents([0, 0]),)), [Wanted("ring")])


def test_a_device_that_is_too_small_is_noted() -> None:
    where = problem()
    small = Problem(where.batches, where.topology, where.attention, where.cluster.with_(memory=1e6), where.layer)
    assert any(
        "a device of a2" in note and "all_gather" in note for note in compare(small, [Wanted("all_gather")]).notes
    )
    assert compare(where, [Wanted("all_gather")]).notes == ()


@pytest.mark.parametrize("name", ["ring", "double_ring", "ulysses", "hybrid", "all_gather", "direct", "hierarchical"])
def test_every_wait_is_for_a_message_that_ends_it(name: str) -> None:
    where = problem()
    timeline = simulate(build_plan(BATCHES[0], where.topology, where.attention, name), where.cluster, where.layer)
    seconds = 0.0
    for direction, sent in (("forward", timeline.transfers), ("backward", timeline.transfers_backward)):
        found = waits(timeline, direction)
        messages = sent[found["message"]]
        np.testing.assert_allclose(messages["end"], found["end"])
        assert ((messages["src"] == found["rank"]) | (messages["dst"] == found["rank"])).all()
        assert (messages["done"] == found["turn"]).all()
        seconds += float((found["end"] - found["begin"]).sum())
    assert seconds == pytest.approx(timeline.exposed.sum())
    assert sum(value for _, value in causes(timeline)) == pytest.approx(timeline.waiting.mean())


def test_causes_tell_nodes_from_each_other() -> None:
    inside = simulate(build_plan(BATCHES[0], Topology(1, 8, "a2"), AttentionConfig(8), "ring"), load_cluster("a2"))
    across = load_cluster("a2").with_ranks(1)
    apart = simulate(build_plan(BATCHES[0], Topology(8, 1, "a2"), AttentionConfig(8), "ring"), across)
    assert all("between nodes" not in name for name, _ in causes(inside))
    assert all("inside nodes" not in name for name, _ in causes(apart))
    assert causes(inside) and causes(apart)
