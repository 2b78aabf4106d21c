"""Ranks of a micro-batch with other plans are told before any message travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_cp import ConfigError, Documents, Topology, build_plan
from mindspeed_cp.megatron import PlannedAttention, megatron_imports, planned_params
from tests.megatron.gpt import Suite, megatron, transformer_config
from tests.megatron.ranks import MegatronRanks

with megatron_imports():
    from megatron.core.transformer.enums import AttnMaskType

HEADS = (4, 2, 2)


def module_on(cp: int, **suite: Any) -> PlannedAttention:
    attention_of_rank = PlannedAttention(
        transformer_config(cp=cp),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        suite=Suite(context_parallel_size=cp, **suite),
    )
    attention_of_rank.use_rotary(None)
    return attention_of_rank


def told(function: Any) -> str | None:
    try:
        function()
    except ConfigError as error:
        return str(error)
    return None


def out_of_step(rank: int, group: None, moves_hidden: bool) -> str | None:
    """Rank 1 is a batch ahead; its documents have the same number of tokens, so that every message fits."""
    with megatron(cp=2):
        module = module_on(2)
        plan = build_plan(Documents([20, 12] if rank == 0 else [12, 20]), Topology(1, 2), module.attention)
        params = planned_params(plan, rank)
        q, k, v = (torch.randn(16, heads, 8) for heads in HEADS)
        if moves_hidden:
            return told(lambda: module.check_before_move(params, q))
        return told(lambda: module(q, k, v, None, packed_seq_params=params))


@pytest.mark.parametrize("moves_hidden", [False, True])
def test_a_data_loader_out_of_step_is_found(ranks: MegatronRanks, moves_hidden: bool) -> None:
    """Before attention, and before hidden states move to its rows."""
    for text in ranks.run(2, out_of_step, moves_hidden):
        assert text is not None and "documents: rank 0 has Documents([20, 12], tokens=32); rank 1 has" in text


def without_a_plan(rank: int, group: None) -> list[str | None]:
    """Batches [s, b, heads, dim] whose plan is made from their rows: rank 1 meets again what it has met before."""
    with megatron(cp=2):
        module = module_on(2)
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
