"""The choice of an algorithm: the fastest by simulation, of those that can do the batch."""

from __future__ import annotations

import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, load_cluster, simulate
from mindspeed_cp.cost import ComputeCost, sample_batch
from mindspeed_cp.cost.bounds import exchange_floor, plan_floor
from mindspeed_cp.cost.candidates import Candidate, candidates
from mindspeed_cp.cost.choose import choose_algorithm
from mindspeed_cp.cost.memory import layer_bytes
from mindspeed_cp.errors import ConfigError

GQA = AttentionConfig(heads=32, kv_heads=8, head_dim=128)
TOPOLOGY = Topology(2, 4, "a2")


def batch(seed: int, ranks: int = 8) -> Documents:
    return Documents(sample_batch("wikipedia", ranks * 4096, seed))


def test_the_choice_is_the_fastest_of_all_that_are_simulated_alone() -> None:
    batches = [batch(0), batch(1)]
    decision = choose_algorithm(batches, TOPOLOGY, GQA)
    cluster = load_cluster("a2")
    alone = {}
    for one in candidates(TOPOLOGY, GQA):
        plans = [build_plan(some, TOPOLOGY, GQA, one.algorithm, **dict(one.options)) for some in batches]
        alone[one] = sum(simulate(plan, cluster).total for plan in plans)
    assert alone[decision.candidate] == pytest.approx(min(alone.values()))
    for one in decision.tried:
        if one.looked_at == 2 and not one.cause:
            assert sum(one.seconds) == pytest.approx(alone[one.candidate])
        assert one.least <= alone[one.candidate] * (1 + 1e-9)
    assert {one.candidate for one in decision.tried} == set(alone)
    assert str(decision.candidate) in decision.reasons[0] and len(decision.reasons) == 3
    again = choose_algorithm(batches, TOPOLOGY, GQA)
    assert again.candidate == decision.candidate and again.reasons == decision.reasons


def test_one_that_is_slow_on_the_first_batch_may_be_the_fastest_of_all() -> None:
    mha = AttentionConfig(heads=32, head_dim=128)
    short, long = Documents([512] * 64), Documents([2**17])
    among = [Candidate("direct", (("layout", "balanced"),)), Candidate("ulysses")]
    alone = choose_algorithm([short], TOPOLOGY, mha, among=among)
    assert alone.candidate == among[0] and alone.tried[1].least > 1.3 * alone.tried[0].seconds[0]
    assert choose_algorithm([short, long], TOPOLOGY, mha, among=among).candidate == among[1]


def test_equal_plans_are_simulated_once_and_said_to_be_equal() -> None:
    """In one node there is nothing to route."""
    among = [Candidate("hierarchical"), Candidate("hierarchical", (("routing", False),)), Candidate("ring")]
    decision = choose_algorithm([batch(0)], Topology(1, 8, "a2"), GQA, among=among)
    first, second, ring = decision.tried
    assert first.candidate == among[0] and second.same_as == among[0] and first.same_as is None and ring.same_as is None
    assert second.seconds == first.seconds and second.timeline is first.timeline
    assert decision.reasons[0].endswith("; the same plans: hierarchical (routing false)")
    assert "ring: " in decision.reasons[2] and "hierarchical" not in decision.reasons[2]


@pytest.mark.parametrize("algorithm", ["ring", "all_gather", "hybrid", "direct", "ulysses", "hierarchical"])
def test_no_simulation_is_faster_than_its_floor(algorithm: str) -> None:
    for name in ("a2", "a800"):
        cluster = load_cluster(name).with_ranks(4)
        for seed in range(3):
            plan = build_plan(batch(seed), Topology(2, 4, name), GQA, algorithm)
            assert plan_floor(plan, ComputeCost(cluster, GQA)).seconds <= simulate(plan, cluster).total * (1 + 1e-9)


@pytest.mark.parametrize("layout", ["zigzag", "balanced", "contiguous"])
@pytest.mark.parametrize("window", [None, (3000, 0)])
def test_what_an_exchange_takes_at_least_is_known_without_its_plan(layout: str, window: tuple[int, int] | None) -> None:
    attention = AttentionConfig(heads=32, kv_heads=8, head_dim=128, window=window)
    for topology in (Topology(2, 4, "a2"), Topology(1, 8, "a2"), Topology(1, 8, "h200"), Topology(3, 5, "a800")):
        cost = ComputeCost(load_cluster(topology.cluster or "").with_ranks(topology.ranks_per_node), attention)
        for seed in range(2):
            documents = batch(seed, topology.ranks)
            floor = exchange_floor(documents, topology, cost, layout)
            for algorithm in ("direct", "all_gather"):
                plan = build_plan(documents, topology, attention, algorithm, layout=layout)
                of_plan = plan_floor(plan, cost)
                if window is None:  # with one, most of what a rank sees may be in its node
                    assert sum(floor.links) > 0.5 * sum(of_plan.links) > 0
                for mine, real in zip(floor.links, of_plan.links, strict=True):
                    assert mine <= real * (1 + 1e-9)


def test_what_does_not_fit_is_left_out_and_named() -> None:
    documents = Documents([8 * 4096])
    plans = {name: build_plan(documents, TOPOLOGY, GQA, name) for name in ("ring", "all_gather")}
    limit = (layer_bytes(plans["ring"]).max() + layer_bytes(plans["all_gather"]).max()) / 2
    among = [Candidate("all_gather"), Candidate("ring")]
    decision = choose_algorithm([documents], TOPOLOGY, GQA, memory=limit, among=among)
    assert decision.candidate == Candidate("ring")
    assert "all_gather: holds" in decision.reasons[2] and "GiB" in decision.reasons[2]
    with pytest.raises(ConfigError, match=r"nothing can do this batch: ring: holds .* GiB in one layer"):
        choose_algorithm([documents], TOPOLOGY, GQA, memory=1.0, among=[Candidate("ring")])
    with pytest.raises(ConfigError, match="batches: there are none"):
        choose_algorithm([], TOPOLOGY, GQA)


def test_candidates_respect_heads_and_one_rank_has_one() -> None:
    few = {one.algorithm for one in candidates(Topology(2, 8), AttentionConfig(heads=8, head_dim=64))}
    assert "ulysses" not in few and "hybrid" in few
    assert [str(one) for one in candidates(Topology(1, 1), GQA)] == ["ring"]
    degrees = [
        dict(one.options)["ulysses_degree"] for one in candidates(Topology(2, 6), GQA) if one.algorithm == "hybrid"
    ]
    assert degrees == [6, 3, 2]  # 4 ranks are neither in a node nor whole nodes
    wide = {str(one) for one in candidates(Topology(4, 4), GQA)}
    assert {"hybrid (ulysses_degree 8)", "double_ring (cp_window_size 8)", "hierarchical (prefetch 1)"} <= wide
    assert {"hierarchical (head_split false)", "direct (prefetch 2)", "ulysses"} <= wide
    for one in candidates(TOPOLOGY, GQA):
        build_plan(batch(0), TOPOLOGY, GQA, one.algorithm, **dict(one.options))


def test_options_of_the_model_reach_those_that_have_them() -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        choose_algorithm([batch(0)], TOPOLOGY, GQA, options={"hidden_size": 0}, among=[Candidate("hierarchical")])
    choose_algorithm([batch(0)], TOPOLOGY, GQA, options={"hidden_size": 0}, among=[Candidate("ring")])
