"""Pipeline stages: rows of every micro-batch differ, every stage rotates by the plan, the last one knows the loss."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from mindspeed_cp.megatron import install, install_model, megatron_imports
from tests.megatron.gpt import (
    Case,
    Suite,
    build,
    forward_step,
    global_loss,
    layer_spec,
    megatron,
    transformer_config,
)
from tests.megatron.models import EXPERTS, NEEDS_PLANNED_ROUTER
from tests.megatron.ranks import MegatronRanks

with megatron_imports():
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

CASE = Case(((37, 0, 5, 1, 64), (3, 50, 1, 1, 0, 7), (11, 2)))


def run_stage(
    rank: int, group: None, cp: int, stages: int, case: Case = CASE, tp: int = 1, only: str = ""
) -> tuple[bool, float, int, float]:
    """(is this the last stage, loss, tokens, sum of squared gradients of this stage whose name contains `only`)."""
    with megatron(tp, cp, pp=stages):
        settings: dict[str, Any] = dict(
            sequence_parallel=tp > 1,
            pipeline_model_parallel_size=stages,
            variable_seq_lengths=stages > 1,
            moe_token_dispatcher_type="alltoall",
        )
        config = transformer_config(tp, cp, **{**settings, **case.config})
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        spec = install(layer_spec(config), Suite(context_parallel_size=cp))
        model = install_model(build(config, spec, pre_process=first, post_process=last))
        fill(model)
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        config.finalize_model_grads_func = finalize_model_grads
        ddp.zero_grad_buffer()
        reports = get_forward_backward_func()(
            forward_step_func=partial(forward_step, case, config, 0),
            data_iterator=iter(range(len(case.batches))),
            model=[ddp],
            num_microbatches=len(case.batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        loss, tokens = global_loss(reports)
        parameters: list[Any] = [parameter for name, parameter in model.named_parameters() if only in name]
        squares = sum(float(parameter.main_grad.double().square().sum()) for parameter in parameters)
        return last, loss, tokens, squares


def fill(model: Any) -> None:
    """Weights that depend on the layer's number in the whole model, not on the stage that holds it."""
    offset = model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + offset)
        if parameter.dim() > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
            torch.nn.init.normal_(parameter, 0.0, 0.2, generator=generator)


@pytest.mark.parametrize("packed", [None, pytest.param("padded", marks=pytest.mark.thorough)])
def test_two_stages_of_two_ranks_equal_one_rank(packed: str | None, ranks: MegatronRanks) -> None:
    """Also where the stages make their plans from plain PackedSeqParams."""
    case = replace(CASE, packed=packed)
    [(_, loss, tokens, squares)] = ranks.run(1, run_stage, 1, 1, case)
    results = ranks.run(4, run_stage, 2, 2, case)
    assert [last for last, *_ in results] == [False, False, True, True]
    for last, *outcome in results:
        if last:
            assert outcome[:2] == [pytest.approx(loss, rel=1e-5), tokens]
    assert results[0][3] + results[2][3] == pytest.approx(squares, rel=1e-5)
    assert results[0][3] == pytest.approx(results[1][3], rel=1e-6)


@NEEDS_PLANNED_ROUTER
@pytest.mark.thorough
def test_every_stage_of_experts_leaves_out_the_padding_of_sequence_parallel_ranks(ranks: MegatronRanks) -> None:
    """Odd numbers of rows, so that the second tensor-parallel rank has a row of padding."""
    case = replace(CASE, config=EXPERTS)
    (_, loss, tokens, squares), _ = ranks.run(2, run_stage, 1, 1, case, 2, "router")
    first, _, *later = ranks.run(4, run_stage, 1, 2, case, 2, "router")
    assert [last for last, *_ in later] == [True, True]
    for _, *outcome in later:
        assert outcome[:2] == [pytest.approx(loss, rel=1e-5), tokens]
    assert first[3] + later[0][3] == pytest.approx(squares, rel=1e-5)
