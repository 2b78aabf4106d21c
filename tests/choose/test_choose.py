"""The choice of an algorithm: the fastest by simulation, of those that can do the batch."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, simulate_plan
from mindspeed_cp.choose.candidates import Candidate, default_candidates
from mindspeed_cp.choose.choose import choose_algorithm
from mindspeed_cp.cluster import ComputeCost, LayerCost, cluster_of
from mindspeed_cp.cluster.compute import balanced_lower_bound
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.verify.memory import attention_peak_bytes

GQA = AttentionConfig(heads=32, kv_heads=8, head_dim=128)
TOPOLOGY = Topology(2, 4, "a2")


def batch(seed: int, ranks: int = 8) -> Documents:
    return Documents(sample_batch("wikipedia", ranks * 4096, seed))


def alone_seconds(
    batches: list[Documents], topology: Topology, attention: AttentionConfig, layer: LayerCost | None = None
) -> dict[Candidate, float]:
    """Seconds of each candidate over all batches."""
    alone = {}
    for candidate in default_candidates(topology, attention):
        plans = [candidate.build_plan(batch, topology, attention, {}) for batch in batches]
        alone[candidate] = sum(simulate_plan(plan, cluster_of(topology), layer).total for plan in plans)
    return alone


def test_the_choice_is_the_fastest_of_all_that_are_simulated_alone() -> None:
    batches = [batch(0), batch(1)]
    decision = choose_algorithm(batches, TOPOLOGY, GQA)
    alone = alone_seconds(batches, TOPOLOGY, GQA)
    assert alone[decision.candidate] == pytest.approx(min(alone.values()))
    for trial in decision.trials:
        if len(trial.seconds) == 2:
            assert sum(trial.seconds) == pytest.approx(alone[trial.candidate])
    assert {len(trial.seconds) for trial in decision.trials} == {1, 2}, "some are dropped after the first batch"
    assert {trial.candidate for trial in decision.trials} == set(alone)
    assert str(decision.candidate) in decision.reasons[0] and len(decision.reasons) == 3
    again = choose_algorithm(batches, TOPOLOGY, GQA)
    assert again.candidate == decision.candidate and again.reasons == decision.reasons


def test_one_that_is_slow_on_the_first_batch_may_be_the_fastest_of_all() -> None:
    mha = AttentionConfig(heads=32, head_dim=128)
    short, long = Documents([512] * 64), Documents([2**17])
    among = [Candidate("direct", (("layout", "balanced"),)), Candidate("ulysses")]
    alone = choose_algorithm([short], TOPOLOGY, mha, candidates=among)
    assert alone.candidate == among[0] and alone.trials[1].seconds[0] > 1.3 * alone.trials[0].seconds[0]
    assert choose_algorithm([short, long], TOPOLOGY, mha, candidates=among).candidate == among[1]


SHAPES = (
    [16000, *[1000] * 135],
    [20000, *[37, 500, 210, 3] * 12],
    [1],
    [900, 0, 4000, 1, 700, 2500, 30],
    [512] * 64,
)
LAYERS = (
    None,
    LayerCost.from_sizes(2048, 8192, 32, 8, 128, 128),
    LayerCost.from_sizes(4096, 11008, 32, 32, 128, 128, bytes_per_element=4),
)
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("direct", {"layout": layout}) for layout in ("zigzag", "balanced", "contiguous")),
    ("all_gather", {}),
    ("ring", {}),
    ("ring", {"layout": "balanced"}),
    ("double_ring", {}),
    ("hybrid", {}),
    ("ulysses", {}),
    ("hierarchical", {}),
    ("hierarchical", {"remap": "hidden"}),
    ("hierarchical", {"remap": "off", "routing": False}),
)


@pytest.mark.parametrize(
    ("topology", "window"),
    [(Topology(2, 4, "a2"), None), (Topology(2, 4, "a800"), (700, 0)), (Topology(1, 8, "a3"), None)],
)
def test_no_simulation_is_faster_than_the_balanced_bound(topology: Topology, window: tuple[int, int] | None) -> None:
    """Shapes whose ranks have very unlike shares of tokens, attention and messages, too; NICs that ranks share."""
    attention = AttentionConfig(heads=16, kv_heads=2, head_dim=128, window=window)
    for turn, lengths in enumerate(SHAPES):
        documents, layer = Documents(lengths), LAYERS[turn % len(LAYERS)]
        cost = ComputeCost(cluster_of(topology), attention, layer)
        bound = balanced_lower_bound(documents, topology.ranks, cost)
        for algorithm, options in WAYS:
            plan = build_plan(documents, topology, attention, algorithm, **options)
            assert bound <= simulate_plan(plan, cost.cluster, layer).total * (1 + 1e-9), (algorithm, options)


def test_candidates_beyond_the_memory_are_dropped_with_the_reason() -> None:
    documents = Documents([8 * 4096])
    plans = {name: build_plan(documents, TOPOLOGY, GQA, name) for name in ("ring", "all_gather")}
    limit = (attention_peak_bytes(plans["ring"]).max() + attention_peak_bytes(plans["all_gather"]).max()) / 2
    among = [Candidate("all_gather"), Candidate("ring")]
    decision = choose_algorithm([documents], TOPOLOGY, GQA, memory=limit, candidates=among)
    assert decision.candidate == Candidate("ring")
    assert "all_gather: holds" in decision.reasons[2] and "GiB" in decision.reasons[2]
    with pytest.raises(ConfigError, match=r"nothing can do this batch: ring: holds .* GiB in one layer"):
        choose_algorithm([documents], TOPOLOGY, GQA, memory=1.0, candidates=[Candidate("ring")])


def test_candidates_respect_heads_and_one_rank_has_one() -> None:
    few = {
        candidate.algorithm for candidate in default_candidates(Topology(2, 8), AttentionConfig(heads=8, head_dim=64))
    }
    assert "ulysses" not in few and "hybrid" in few
    assert [str(candidate) for candidate in default_candidates(Topology(1, 1), GQA)] == ["ring"]
    degrees = [
        dict(candidate.options)["ulysses_degree"]
        for candidate in default_candidates(Topology(2, 6), GQA)
        if candidate.algorithm == "hybrid"
    ]
    assert degrees == [6, 3, 2]  # 4 ranks are neither in a node nor whole nodes
    wide = {str(candidate) for candidate in default_candidates(Topology(4, 4), GQA)}
    assert {"hybrid (ulysses_degree 8)", "double_ring (cp_window_size 8)", "hierarchical (prefetch 1)"} <= wide
    assert {"hierarchical (head_split false)", "direct (prefetch 2)", "ulysses"} <= wide
    for candidate in default_candidates(TOPOLOGY, GQA):
        build_plan(batch(0), TOPOLOGY, GQA, candidate.algorithm, **dict(candidate.options))


def test_options_of_the_model_reach_those_that_have_them() -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        choose_algorithm([batch(0)], TOPOLOGY, GQA, options={"hidden_size": 0}, candidates=[Candidate("hierarchical")])
    choose_algorithm([batch(0)], TOPOLOGY, GQA, options={"hidden_size": 0}, candidates=[Candidate("ring")])


def test_the_fastest_is_never_dropped_where_ranks_are_unlike() -> None:
    topology, layer = Topology(1, 8, "h800"), LayerCost(536870912.0, 4096, 100663296.0, 33554432.0, 1, 4)
    attention = AttentionConfig(heads=32, head_dim=128)
    for batches in ([[16000, *[1000] * 145]], [[16000, *[1000] * 145], [16000, *[512] * 144]]):
        documents = [Documents(lengths) for lengths in batches]
        decision = choose_algorithm(documents, topology, attention, layer=layer)
        least = min(alone_seconds(documents, topology, attention, layer).values())
        assert sum(decision.trials[0].seconds) == pytest.approx(least, rel=1e-6)


def test_nothing_to_choose_from_or_by_is_refused() -> None:
    with pytest.raises(ConfigError, match="candidates: there are none"):
        choose_algorithm([batch(0)], TOPOLOGY, GQA, candidates=[])
    for empty in ([], [Documents([])], [Documents([0, 0])]):
        with pytest.raises(ConfigError, match="all batches are empty"):
            choose_algorithm(empty, TOPOLOGY, GQA)
