"""Algorithms compared by simulation: figures, the even ring, refusals, what ranks wait for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.choose.compare import Comparison, SimulationCase, compare_algorithms
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.report.simulation import range_of_conclusion
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.timeline import wait_records, waiting_causes

BATCHES = (Documents([3000, 40, 900, 5200, 0, 260]), Documents([8000, 100]))


def problem(nodes: int = 2, per: int = 4, batches: tuple[Documents, ...] = BATCHES) -> SimulationCase:
    attention = AttentionConfig(8, 2, 64)
    cluster = load_cluster("a2").with_ranks(per)
    return SimulationCase(batches, Topology(nodes, per, "a2"), attention, cluster, LayerCost.for_attention(attention))


def comparison(*names: str) -> Comparison:
    return compare_algorithms(problem(), [Candidate(name) for name in names])


def test_figures_are_means_of_the_batches_and_the_fastest_is_first() -> None:
    compared = comparison("ulysses", "direct", "hierarchical")
    where = problem()
    assert [result.metrics.seconds for result in compared.results] == sorted(
        result.metrics.seconds for result in compared.results
    )
    assert {result.name for result in compared.results} == {"ring", "ulysses", "direct", "hierarchical"}
    for result in compared.results:
        each = [
            simulate_plan(build_plan(batch, where.topology, where.attention, result.name), where.cluster, where.layer)
            for batch in BATCHES
        ]
        metrics = result.metrics
        assert metrics.seconds == pytest.approx(np.mean([t.total for t in each]))
        assert metrics.exposed == pytest.approx(np.mean([t.exposed.mean() for t in each]))
        assert metrics.hidden == pytest.approx(np.mean([t.hidden.mean() for t in each]))
        assert metrics.sent == pytest.approx(np.mean([t.bytes_sent.mean() for t in each]))
        assert metrics.sent_most == max(t.bytes_sent.max() for t in each)
        assert metrics.memory == max(t.memory.max() for t in each)
        # A rank computes, waits for messages or waits for the others: nothing else, and nothing twice.
        assert metrics.compute + metrics.exposed + metrics.late == pytest.approx(metrics.seconds)
        assert result.timeline.total == each[0].total


def test_speed_and_bound_are_ratios_of_times() -> None:
    compared = comparison("hierarchical", "ring")
    where = problem()
    bounds = [choose_placement(batch, batch, where.topology, where.attention).bound for batch in BATCHES]
    assert compared.bound == pytest.approx(np.mean(bounds))
    assert compared.ring.metrics.speedup == 1.0
    for result in compared.results:
        assert result.metrics.speedup == pytest.approx(compared.ring.metrics.seconds / result.metrics.seconds)
        assert 0 < result.metrics.fraction == pytest.approx(compared.bound / result.metrics.seconds)
        assert result.metrics.fraction <= 1


def test_the_even_ring_is_there_though_nobody_asked_and_only_once() -> None:
    assert [result.name for result in comparison("ring", "ring").results] == ["ring"]
    compared = compare_algorithms(problem(), [Candidate("ring", (("layout", "balanced"),))])
    assert {result.name for result in compared.results} == {"ring", "ring:layout=balanced"}
    assert compared.ring.name == "ring"


def test_refused_algorithms_have_reasons_and_others_run() -> None:
    wanted = [
        Candidate("hierarchical", (("max_seqlen_per_dp_cp_rank", 100),)),
        Candidate("hybrid", (("ulysses_degree", 3),)),
    ]
    compared = compare_algorithms(problem(), [*wanted, Candidate("direct")])
    assert {result.name for result in compared.results} == {"ring", "direct"}
    assert "max_seqlen_per_dp_cp_rank = 100" in compared.refused["hierarchical:max_seqlen_per_dp_cp_rank=100"]
    assert "ulysses_degree is 3" in compared.refused["hybrid:ulysses_degree=3"]


def test_sizes_of_the_model_reach_the_plan_and_stay_out_of_the_name() -> None:
    compared = compare_algorithms(replace(problem(), sizes={"hidden_size": 0}), [Candidate("hierarchical")])
    assert compared.refused.keys() == {"hierarchical"} and "hidden_size is 0" in compared.refused["hierarchical"]


def test_batches_without_a_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="the batch has no tokens"):
        compare_algorithms(problem(batches=(Documents([0, 0]),)), [Candidate("ring")])


def test_a_device_that_is_too_small_is_noted() -> None:
    where = problem()
    small = SimulationCase(
        where.batches, where.topology, where.attention, where.cluster.with_values(memory=1e6), where.layer
    )
    assert any(
        "a device of a2" in note and "all_gather" in note
        for note in compare_algorithms(small, [Candidate("all_gather")]).notes
    )
    assert compare_algorithms(where, [Candidate("all_gather")]).notes == ()


@pytest.mark.parametrize("name", ["ring", "double_ring", "ulysses", "hybrid", "all_gather", "direct", "hierarchical"])
def test_every_wait_is_for_a_message_that_ends_it(name: str) -> None:
    where = problem()
    timeline = simulate_plan(build_plan(BATCHES[0], where.topology, where.attention, name), where.cluster, where.layer)
    seconds = 0.0
    for direction, sent in (("forward", timeline.transfers_forward), ("backward", timeline.transfers_backward)):
        records = wait_records(timeline, direction)
        messages = sent[records["message"]]
        np.testing.assert_allclose(messages["end"], records["end"])
        assert ((messages["src"] == records["rank"]) | (messages["dst"] == records["rank"])).all()
        assert (messages["done"] == records["step"]).all()
        seconds += float((records["end"] - records["begin"]).sum())
    assert seconds == pytest.approx(timeline.exposed.sum())
    assert sum(value for _, value in waiting_causes(timeline)) == pytest.approx(timeline.waiting.mean())


def test_causes_tell_nodes_from_each_other() -> None:
    inside = simulate_plan(build_plan(BATCHES[0], Topology(1, 8, "a2"), AttentionConfig(8), "ring"), load_cluster("a2"))
    across = load_cluster("a2").with_ranks(1)
    apart = simulate_plan(build_plan(BATCHES[0], Topology(8, 1, "a2"), AttentionConfig(8), "ring"), across)
    assert all("between nodes" not in name for name, _ in waiting_causes(inside))
    assert all("inside nodes" not in name for name, _ in waiting_causes(apart))
    assert waiting_causes(inside) and waiting_causes(apart)


def test_the_ends_of_the_ranges_are_those_of_the_first_batch() -> None:
    compared, where = comparison("direct"), problem()
    best = compared.results[0]
    assert [fastest for fastest, _ in compared.range_ends] == [
        simulate_plan(best.timeline.plan, where.cluster.at_range_end(slow), where.layer).total for slow in (False, True)
    ]
    (fast, _), (slow, slow_ring) = compared.range_ends
    assert fast < best.timeline.total < slow < slow_ring
    text = range_of_conclusion(compared)
    assert f"of their ranges direct takes {compared.ms(fast)} ms, " in text and "for the first batch; at" in text
    assert f"at the slow end {compared.ms(slow)} ms, {slow_ring / slow:.2f} times as fast as the even ring." in text
    assert "Uncertain on a2: attention_efficiency, linear_efficiency" in text
    certain = compare_algorithms(replace(where, cluster=where.cluster.with_values(ranges={})), [Candidate("direct")])
    assert not certain.range_ends and not range_of_conclusion(certain)
