"""Plans of layers that attend in different ways hold the same rows, each is proved, and few plans are kept."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms import ALGORITHMS, plan_cache, register_algorithm
from mindspeed_cp.algorithms.plan_cache import PlanCache, build_layer_plans
from mindspeed_cp.report.plan import PlanSummary

DOCUMENTS = Documents([700, 3, 0, 90, 41, 260, 12])
ATTENTIONS = (
    AttentionConfig(4, 2, 16, window=(30, 0)),
    AttentionConfig(4, 2, 16),
    AttentionConfig(4, 2, 16, alibi=True),
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("topology", [Topology(1, 3), Topology(2, 2)])
def test_layers_hold_the_same_rows(algorithm: str, topology: Topology) -> None:
    plans = build_layer_plans(DOCUMENTS, topology, ATTENTIONS, algorithm)
    assert [plan.attention for plan in plans] == list(ATTENTIONS)
    for plan in plans:
        assert plan.batch_layout.same_as(plans[0].batch_layout)
        verify_plan(plan)


def test_a_balanced_layout_is_that_of_the_layer_with_most_work() -> None:
    plans = build_layer_plans(DOCUMENTS, Topology(1, 4), ATTENTIONS[:2], "direct", layout="balanced")
    assert plans[0].layout.same_as(plans[1].layout) and plans[0].algorithm == "kv_fetch"
    assert plans[1].algorithm == "direct"
    verify_plan(plans[0])


@pytest.mark.parametrize("remap", ["off", "qkv", "auto"])
def test_a_remap_keeps_the_rows_of_all_layers(remap: str) -> None:
    plans = build_layer_plans(DOCUMENTS, Topology(2, 2), ATTENTIONS, "hierarchical", remap=remap)
    for plan in plans:
        assert plan.batch_layout.same_as(plans[0].batch_layout)
        verify_plan(plan)


def test_an_algorithm_with_rows_by_the_attention_keeps_those_of_the_layer_with_most_work() -> None:
    def build(documents: Documents, kv_documents: Documents, topology: Topology, attention: AttentionConfig) -> Plan:
        """Place rows by the window."""
        layout = "contiguous" if attention.window is None else "zigzag"
        return build_plan(documents, topology, attention, "direct", layout=layout)

    register_algorithm("by_window", build)
    try:
        plans = build_layer_plans(DOCUMENTS, Topology(1, 4), ATTENTIONS[:2], "by_window")
    finally:
        del ALGORITHMS["by_window"]
    assert [plan.algorithm for plan in plans] == ["kv_fetch", "direct"]
    assert plans[0].batch_layout.same_as(plans[1].batch_layout)


def test_few_plans_are_kept_and_the_one_not_asked_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 3)
    monkeypatch.setattr(plan_cache, "MAX_CACHED_TOKENS", 100)
    ready: list[int] = []
    cache = PlanCache(lambda plan: ready.append(plan.documents.tokens))
    attention, topology = AttentionConfig(2, head_dim=8), Topology(1, 2)

    def get(*lengths: int, algorithm: str = "ring", **options: Any) -> Any:
        return cache.get(Documents(lengths), topology, attention, algorithm, options)

    first = get(20)
    assert get(20) is first and ready == [20] and (cache.misses, cache.hits) == (1, 1)
    assert get(20, algorithm="direct") is not first and get(20, layout="contiguous") is not first
    assert cache.get(Documents([20]), topology, AttentionConfig(4, head_dim=8), "ring", {}) is not first
    assert len(cache) == 3 and get(20) is not first, "a fourth was asked for since"
    assert get(20, layout="contiguous") and cache.hits == 2
    get(50), get(49)
    assert len(cache) == 2 and cache.tokens == 99, "100 tokens in all"
    get(10_000)
    assert len(cache) == 1, "one is kept, however long"
    with pytest.raises(ConfigError):
        get(10, algorithm="none")
    assert len(cache) == 1


def test_plans_of_the_same_lengths_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_CACHED_TOKENS", 3 * DOCUMENTS.tokens)
    cache = PlanCache()
    plans = cache.get_layers(DOCUMENTS, Topology(1, 2), ATTENTIONS[:2], "direct", {})
    assert cache.get_layers(DOCUMENTS, Topology(1, 2), ATTENTIONS[:2], "direct", {}) is plans
    assert (cache.hits, cache.misses, len(cache), cache.tokens) == (1, 1, 2, 2 * DOCUMENTS.tokens)
    assert cache.get(DOCUMENTS, Topology(1, 2), ATTENTIONS[0], "direct", {}) is not plans[0]
    assert (len(cache), cache.misses) == (3, 2)
    cache.get_layers(DOCUMENTS, Topology(1, 2), ATTENTIONS[1:], "direct", {})
    assert (len(cache), cache.tokens) == (3, 3 * DOCUMENTS.tokens)


def test_a_window_fetches_only_what_it_needs() -> None:
    window, full = build_layer_plans(
        Documents([4000]), Topology(1, 4), ATTENTIONS[:2], "hierarchical", head_split=False
    )
    sent = [int(PlanSummary(plan).sent_forward.sum()) for plan in (window, full)]
    assert window.algorithm == "kv_fetch" and 0 < sent[0] < sent[1] / 10


def test_hidden_remap_of_several_attentions_is_refused() -> None:
    with pytest.raises(ConfigError, match="no attention was given"):
        build_layer_plans(DOCUMENTS, Topology(1, 2), ())
    with pytest.raises(ConfigError, match="remap moves hidden states"):
        build_layer_plans(DOCUMENTS, Topology(1, 4), ATTENTIONS[:2], "hierarchical", remap="hidden", head_split=False)
