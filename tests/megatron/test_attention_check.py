"""--cp-plan-check-attention: attention that one rank computes wrong ends a run of Megatron's own scripts."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_cp import ConfigError
from mindspeed_cp.errors import CorruptionError
from mindspeed_cp.megatron import pretrain
from mindspeed_cp.megatron.adaptors import core_attention
from mindspeed_cp.megatron.pretrain.data import ATTENTION_CHECK, IterationChecks
from tests.megatron.gpt import megatron
from tests.megatron.ranks import MegatronRanks
from tests.megatron.script_arguments import rows, stand_in
from tests.megatron.test_agreement import HEADS, module_on

ITERATIONS = 12


def train(rank: int, group: None, path: str, interval: int, factor: float, differentiates: bool) -> list[str]:
    """Errors of iterations of one layer, whose output or gradient is `factor` times too large on rank 1."""
    modules, start = stand_in(path)
    errors = []
    with pytest.MonkeyPatch.context() as patch, megatron(cp=2):
        for name, stands_in in modules.items():
            patch.setitem(sys.modules, name, stands_in)
        patch.setattr(ATTENTION_CHECK, "__dict__", IterationChecks().__dict__)
        attend = core_attention.context_parallel_attention
        patch.setattr(
            core_attention,
            "context_parallel_attention",
            lambda *tensors, **how: attend(*tensors, **how) * (factor if rank == 1 else 1.0),
        )
        module = module_on(2)
        for iteration in range(ITERATIONS):
            start(context_parallel_size=2, cp_plan_check_attention=interval, curr_iteration=iteration)
            try:
                _, params = pretrain.get_batch(iter([rows()]), module.config)
            except CorruptionError as error:
                errors.append(str(error))
            ended: list[bool] = [False, False]
            dist.all_gather_object(ended, bool(errors))
            if any(ended):
                break
            q, k, v = (torch.randn(params.rows, heads, 8, requires_grad=True) for heads in HEADS)
            out = module(q, k, v, None, packed_seq_params=params)
            if differentiates:
                out.sum().backward()
    return errors


@pytest.mark.parametrize("differentiates", [False, True])
@pytest.mark.parametrize("interval", [1, 2])
def test_attention_that_one_rank_computes_too_large_ends_the_run(
    ranks: MegatronRanks, plan_file: str, interval: int, differentiates: bool
) -> None:
    first, second = ranks.run(2, train, plan_file, interval, 1.5, differentiates)
    assert not first and len(second) == 1
    assert "attention of layer 1, head" in second[0] and "on rank 1 " in second[0]


@pytest.mark.parametrize(("interval", "factor"), [(1, 1.0), (0, 1.5)])
def test_right_attention_and_a_run_without_the_flag_go_on(
    ranks: MegatronRanks, plan_file: str, interval: int, factor: float
) -> None:
    assert ranks.run(2, train, plan_file, interval, factor, True) == [[], []]


@pytest.mark.parametrize("value", [-1, 2.5, "x"])
def test_an_interval_that_is_no_count_is_refused(run: Callable[..., Namespace], value: Any) -> None:
    with pytest.raises(ConfigError, match=r"cp_plan_check_attention is .*; valid: a number of iterations, 0 or more"):
        pretrain.suite_of(run(cp_plan_check_attention=value))
