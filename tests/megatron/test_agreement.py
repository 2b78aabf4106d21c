"""Ranks of a micro-batch with other plans or another batch are told before any message travels."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError, Documents, Topology, build_plan
from mindspeed_cp.megatron import (
    PlannedAttention,
    megatron_imports,
    planned_batch,
    planned_batch_from,
    planned_params,
    pretrain,
    trajectory_batch,
)
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from tests.megatron.gpt import Suite, megatron, transformer_config
from tests.megatron.packed import plain_params
from tests.megatron.ranks import MegatronRanks
from tests.megatron.script_arguments import rows, stand_in

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


def of_plain_parameters(rank: int, group: None) -> list[str | None]:
    """Batches whose plan is made from cu_seqlens: rank 1 meets again what it has met before."""
    with megatron(cp=2):
        module = module_on(2)
        results = []
        for rows in ((4, 4), (6, 6), (4, 6), (4, 4)):
            x = [torch.randn(rows[rank], heads, 8) for heads in HEADS]
            given = plain_params([2 * rows[rank]])
            results.append(told(lambda x=x, given=given: module(*x, None, packed_seq_params=given)))
        return results


def test_batches_of_plain_parameters_are_compared_at_every_call(ranks: MegatronRanks) -> None:
    for first, second, other, last in ranks.run(2, of_plain_parameters):
        assert first is second is last is None
        assert (
            other is not None and "documents: rank 0 has Documents([8], tokens=8); rank 1 has Documents([12]" in other
        )


def params_of(entry: str, rank: int, module: PlannedAttention, path: str, changed: str | None) -> PlannedBatchParams:
    """The parameters that an entry gives a rank whose micro-batch has another number in the tensor that is named."""
    whole = rows()
    if changed is not None:
        whole[changed][1, 3] += 1
    if entry == "get_batch":
        modules, start = stand_in(path)
        with pytest.MonkeyPatch.context() as patch:
            for name, stands_in in modules.items():
                patch.setitem(sys.modules, name, stands_in)
            start(context_parallel_size=2)
            return pretrain.get_batch(iter([whole]), module.config)[1]
    if entry == "planned_batch_from":
        return planned_batch_from(whole, module.config, module.suite, rank)[1]
    plan = build_plan(Documents([5, 11, 8, 24]), Topology(1, 2), module.attention)
    return planned_batch({name: x.reshape(-1) for name, x in whole.items() if name != "position_ids"}, plan, rank)[1]


def with_other_batch(rank: int, group: None, entry: str, path: str, changed: str | None, announces: bool) -> str | None:
    with megatron(cp=2):
        module = module_on(2)
        params = params_of(entry, rank, module, path, changed if rank == 1 else None)
        q, k, v = (torch.randn(params.rows, heads, 8) for heads in HEADS)
        if announces:
            module.announce(params, q)
        return told(lambda: module(q, k, v, None, packed_seq_params=params))


@pytest.mark.parametrize("changed", [None, "tokens", "labels", "loss_mask"])
@pytest.mark.parametrize("entry", ["get_batch", "planned_batch_from", "planned_batch"])
def test_a_rank_with_other_tokens_labels_or_loss_masks_is_told(
    ranks: MegatronRanks, plan_file: str, entry: str, changed: str | None
) -> None:
    """Documents and plans are the same on both ranks."""
    for text in ranks.run(2, with_other_batch, entry, plan_file, changed, entry == "get_batch"):
        assert text is None if changed is None else "the same plan: batch_digest: rank 0 has" in str(text)


def with_other_weights(rank: int, group: None) -> str | None:
    packed = Documents.from_trajectories([np.arange(9), np.array([0, 1, 2, 7, 7])])
    with megatron(cp=2):
        module = module_on(2)
        plan = build_plan(packed.documents, Topology(1, 2), module.attention)
        _, params = trajectory_batch(packed, plan, rank, [1.0, 1.0 + rank])
        q, k, v = (torch.randn(params.rows, heads, 8) for heads in HEADS)
        return told(lambda: module(q, k, v, None, packed_seq_params=params))


def test_a_rank_with_other_weights_of_trajectories_is_told(ranks: MegatronRanks) -> None:
    for text in ranks.run(2, with_other_weights):
        assert "the same plan: batch_digest: rank 0 has" in str(text)
