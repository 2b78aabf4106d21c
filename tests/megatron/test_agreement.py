"""verify_plans: ranks of a micro-batch with other plans are told before any message travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_cp import ConfigError, Documents, Topology, build_plan
from mindspeed_cp.megatron import PlannedAttention, megatron_imports, planned_params
from mindspeed_cp.megatron.adaptors import core_attention
from tests.megatron.gpt import Suite, megatron, transformer_config
from tests.megatron.ranks import MegatronRanks

with megatron_imports():
    from megatron.core.transformer.enums import AttnMaskType

HEADS = (4, 2, 2)


def module_on(cp: int, verify: bool, **suite: Any) -> PlannedAttention:
    attention_of_rank = PlannedAttention(
        transformer_config(cp=cp),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        suite=Suite(context_parallel_size=cp, verify_plans=verify, **suite),
    )
    attention_of_rank.use_rotary(None)
    return attention_of_rank


def told(function: Any) -> str | None:
    try:
        function()
    except ConfigError as error:
        return str(error)
    return None


def out_of_step(rank: int, group: None, verify: bool) -> str | None:
    """Rank 1 is a batch ahead; its documents have the same number of tokens, so that every message fits."""
    with megatron(cp=2):
        module = module_on(2, verify)
        plan = build_plan(Documents([20, 12] if rank == 0 else [12, 20]), Topology(1, 2), module.attention)
        q, k, v = (torch.randn(16, heads, 8) for heads in HEADS)
        return told(lambda: module(q, k, v, None, packed_seq_params=planned_params(plan, rank)))


def test_a_data_loader_out_of_step_is_found(ranks: MegatronRanks) -> None:
    for text in ranks.run(2, out_of_step, True):
        assert text is not None and "documents: rank 0 has Documents([20, 12], tokens=32); rank 1 has" in text
    assert ranks.run(2, out_of_step, False) == [None, None], (
        "not compared, and so not noticed: what verify_plans is for"
    )


def without_a_plan(rank: int, group: None) -> list[str | None]:
    """Batches [s, b, heads, dim] whose plan is made from their rows: rank 1 meets again what it has met before."""
    with megatron(cp=2):
        module = module_on(2, True)
        results = []
        for rows in ((4, 4), (6, 6), (4, 6), (4, 4)):
            x = [torch.randn(rows[rank], 1, heads, 8) for heads in HEADS]
            results.append(told(lambda x=x: module(*x, None)))
        return results


def test_batches_without_a_plan_are_compared_at_every_call(ranks: MegatronRanks) -> None:
    for first, second, other, last in ranks.run(2, without_a_plan):
        assert first is second is last is None
        assert (
            other is not None and "documents: rank 0 has Documents([8], tokens=8); rank 1 has Documents([12]" in other
        )


def test_a_plan_is_compared_once_for_all_layers_and_recomputation(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(core_attention, "check_agreement", lambda plan, dtype, *more: seen.append((plan, dtype)))
    first, second = module_on(1, True), module_on(1, True)
    plan = build_plan(Documents([9, 2]), Topology(), first.attention)
    params = planned_params(plan, 0)
    q, k, v = (torch.randn(11, heads, 8) for heads in HEADS)
    for module in (first, second, first):
        module(q, k, v, None, packed_seq_params=params)
    assert seen == [(plan, torch.float32)]
    first(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, packed_seq_params=params)
    assert seen[1:] == [(plan, torch.bfloat16)], "another type is another question"
    first(q, k, v, None, packed_seq_params=planned_params(plan, 0))
    assert len(seen) == 3, "another micro-batch, which another rank may have planned anew"
    module_on(1, False)(q, k, v, None, packed_seq_params=planned_params(plan, 0))
    assert len(seen) == 3
