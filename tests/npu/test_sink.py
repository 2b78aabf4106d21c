"""Attention sinks on tensors of device "npu": with maximum and sum as statistics or lse and 1, in fp32 and bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mindspeed_cp import context_parallel_attention
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.reference import dense_packed_attention
from tests.engine.cases import Case, whole
from tests.engine.layer_weights import largest_error, sink_of
from tests.engine.test_sink import PROBLEMS, RESULTS
from tests.npu.ranks import run
from tests.npu.test_table import ROUGH, tensors

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
NAMES = ("packed and ragged", "heads that no rank count divides", "window", "ALiBi")


def attend_all(rank: int, size: int, cases: list[tuple[str, Any]]) -> list[list[np.ndarray]]:
    """This rank's rows of out, dq, dk and dv of every case, and dsink of all ranks."""
    results = []
    for statistics, case in cases:
        plan, (q, k, v, dout) = case.plan(), case.inputs()
        rows = [plan.layout.shard(q, rank), plan.kv_layout_in.shard(k, rank), plan.kv_layout_in.shard(v, rank)]
        leaves = [x.to("npu").requires_grad_() for x in (*rows, sink_of(case))]
        out = context_parallel_attention(*leaves[:3], plan, backend=NpuAttention(statistics=statistics), sink=leaves[3])
        gradients = torch.autograd.grad(out, leaves, plan.layout.shard(dout, rank).to("npu"))
        dist.all_reduce(gradients[3])
        results.append([x.detach().float().cpu().numpy() for x in (out, *gradients)])
    return results


def test_sinks_agree_with_fp64() -> None:
    kinds = (("max_sum", torch.float32), ("lse", torch.float32), ("max_sum", torch.bfloat16))
    cases = [
        (statistics, replace(PROBLEMS[name], dtype=dtype).on(3, variant))
        for statistics, dtype in kinds
        for name in NAMES
        for variant in ("ring", "hierarchical")
    ]
    parts = run(3, attend_all, cases, environment=ROUGH).values()
    for i, (statistics, case) in enumerate(cases):
        results = [tensors(part[i]) for part in parts]
        dsinks = [rank_results.pop() for rank_results in results]
        error = largest_error(case, dict(zip(RESULTS, [*whole(case, results), dsinks[0]], strict=True)))
        assert error < LIMITS[case.dtype], (statistics, case, error)


FAR = torch.tensor([100.0, 4.0, 400.0, 60.0])


def attend_below(rank: int, size: int, case: Case, statistics: str) -> list[np.ndarray]:
    """out, dq, dk, dv and dsink of one rank whose sinks are as high as FAR."""
    q, k, v, dout = case.inputs()
    leaves = [x.to("npu").requires_grad_() for x in (q, k, v, FAR)]
    backend = NpuAttention(statistics=statistics)
    out = context_parallel_attention(*leaves[:3], case.plan(), backend=backend, sink=leaves[3])
    gradients = torch.autograd.grad(out, leaves, dout.to("npu"))
    return [x.detach().cpu().numpy() for x in (out, *gradients)]


@pytest.mark.parametrize("statistics", ["max_sum", "lse"])
def test_sinks_far_above_all_scores_agree_with_fp64(statistics: str) -> None:
    """exp(sink - largest score) is beyond fp32 in two heads."""
    case = Case((129, 3, 50), 1)
    q, k, v, dout = case.inputs()
    leaves = [x.double().requires_grad_() for x in (q, k, v, FAR)]
    out, _ = dense_packed_attention(case.attention, *leaves[:3], case.documents, sink=leaves[3])
    exact = [out, *torch.autograd.grad(out, leaves, dout.double())]
    [computed] = run(1, attend_below, case, statistics, environment=ROUGH).values()
    for name, own, wanted in zip(RESULTS, computed, exact, strict=True):
        assert torch.allclose(torch.from_numpy(own).double(), wanted, rtol=1e-4, atol=1e-5), name
