"""--cp-plan-pool: micro-batches of all replicas over all their ranks, in Megatron's own scripts."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.data.dispatch import PoolModel
from mindspeed_cp.megatron import pretrain, shift_labels
from tests.megatron.gpt import VOCABULARY, megatron, transformer_config
from tests.megatron.models import NEEDS_PACKED
from tests.megatron.ranks import MegatronRanks
from tests.megatron.script_arguments import stand_in
from tests.megatron.test_pretrain_script import assert_equal, losses

LENGTHS = (((5, 11, 8), (24,)), ((1, 23), (12, 12)))  # of the two rows of each of two replicas
POOL: dict[str, Any] = dict(cp_plan_set=["algorithm=hierarchical"], cp_plan_pool=True)


def rows_of_replica(replica: int) -> dict[str, torch.Tensor]:
    """A micro-batch of a replica; its token numbers differ from those of the other replica."""
    lengths = LENGTHS[replica]
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(replica))
    labels, mask = shift_labels(tokens, Documents([n for row in lengths for n in row]))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}


def batch_of_rank(rank: int, group: None, path: str, pooled: bool) -> dict[str, Any]:
    """What one of two replicas of two context-parallel ranks gets."""
    modules, start = stand_in(path)
    choose = PoolModel.choose
    with pytest.MonkeyPatch.context() as patch, megatron(cp=2):
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(PoolModel, "choose", lambda *given: replace(choose(*given), pooled=pooled))
        start(context_parallel_size=2, curr_iteration=3, **POOL)
        config = transformer_config(cp=2, attention_dropout=0.1)
        batch, params = pretrain.get_batch(iter([rows_of_replica(rank // 2)]), config)
        return {
            "rank": params.rank,
            "pooled": params.pooled,
            "documents": params.plan.documents.lengths.tolist(),
            "seed": params.dropout_seed,
            "tokens": params.linear.tokens(params.rank).tolist(),
            "batch": {name: value[0, : params.linear_rows].tolist() for name, value in batch.items()},
        }


@pytest.mark.parametrize("pooled", [True, False])
def test_the_ranks_of_all_replicas_hold_all_rows_once(ranks: MegatronRanks, plan_file: str, pooled: bool) -> None:
    outcomes = ranks.run(4, batch_of_rank, plan_file, pooled)
    assert [outcome["pooled"] for outcome in outcomes] == [pooled] * 4
    assert [outcome["rank"] for outcome in outcomes] == ([0, 1, 2, 3] if pooled else [0, 1, 0, 1])
    parts = [outcomes] if pooled else [outcomes[:2], outcomes[2:]]
    for number, part in enumerate(parts):
        replicas = (0, 1) if pooled else (number,)
        documents = [n for replica in replicas for row in LENGTHS[replica] for n in row]
        whole = [rows_of_replica(replica) for replica in replicas]
        assert len({outcome["seed"] for outcome in part}) == 1
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            expected = torch.cat([batch[name].flatten() for batch in whole]).numpy()
            held = np.full(len(expected), -1.0)
            for outcome in part:
                assert outcome["documents"] == documents
                held[outcome["tokens"]] = outcome["batch"][name]
            assert np.array_equal(held, expected), name
    seeds = {outcome["seed"] for outcome in outcomes}
    assert len(seeds) == len(parts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(cp_plan_set=[]), "cp_plan_pool is True, and algorithm is 'ring'; valid with it: 'hierarchical'"),
        (
            dict(num_experts=4, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1),
            "cp_plan_pool is True; valid .*False .losses of experts are of whole micro-batches",
        ),
        pytest.param(
            dict(mtp_num_layers=1), "cp_plan_pool is True; valid .*multi-token prediction counts", marks=NEEDS_PACKED
        ),
    ],
)
def test_the_pool_refuses_other_algorithms_and_losses_of_micro_batches(
    run: Callable[..., Namespace], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        pretrain.suite_of(run(**{**POOL, **changes}))


def test_a_rank_holds_at_most_one_and_a_half_shares(
    run: Callable[..., Namespace], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspeed_cp.megatron.adaptors import batch as batch_module

    monkeypatch.setattr(batch_module.parallel_state, "get_context_parallel_rank", lambda: 0)
    for more, bound in (([], 36), (["max_seqlen_per_dp_cp_rank=30"], 30)):
        run(context_parallel_size=2, cp_plan_set=["algorithm=hierarchical", *more])
        _, params = pretrain.get_batch(iter([rows_of_replica(0)]), transformer_config(cp=2))
        assert params.layout.token_counts.max() <= bound


@pytest.mark.usefixtures("megatron_parser")
def test_megatron_trains_as_with_one_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("pool")
    without_dropout = ["--attention-dropout", "0", "--micro-batch-size", "1"]
    flags = ["--context-parallel-size", "2", "--cp-plan-pool", "--cp-plan-set", "algorithm=hierarchical"]
    flags += ["--use-distributed-optimizer"]
    assert_equal(losses(folder, 4, *without_dropout, *flags), losses(folder, 1, *without_dropout))
