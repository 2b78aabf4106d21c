"""The cache of plans: few are kept, and a plan is prepared once."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology
from mindspeed_cp.algorithms.plan_cache import PlanCache


def test_few_plans_are_kept_and_the_one_not_asked_for_longest_goes() -> None:
    ready: list[int] = []
    cache = PlanCache(lambda plan: ready.append(plan.documents.tokens), max_plans=3, max_tokens=100)
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
