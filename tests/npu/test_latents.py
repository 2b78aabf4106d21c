"""Latents that travel between ranks of device "npu": out and all gradients in fp32 and bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_cp import context_parallel_latent_attention
from tests.engine.layer_weights import kv_up_of, largest_error
from tests.engine.test_latents import PROBLEMS, RESULTS
from tests.npu.ranks import run
from tests.npu.test_sink import LIMITS
from tests.npu.test_table import ROUGH, tensors

NAMES = ("packed and ragged", "window", "shorter than the ranks")


def attend_all(rank: int, size: int, cases: list[Any]) -> list[list[np.ndarray]]:
    """This rank's rows of out, dq, dshared and dlatent of every case, and dkv_up of all ranks."""
    results = []
    for case in cases:
        plan, (q, shared, latent, dout) = case.plan(), case.inputs()
        rows = [plan.layout.shard(x, rank) for x in (q, shared[:, 0], latent[:, 0])]
        leaves = [x.to("npu").requires_grad_() for x in (*rows, kv_up_of(case))]
        out = context_parallel_latent_attention(*leaves, plan)
        gradients = torch.autograd.grad(out, leaves, plan.layout.shard(dout, rank).to("npu"))
        dkv_up = gradients[3].float()
        dist.all_reduce(dkv_up)
        results.append([x.detach().float().cpu().numpy() for x in (out, *gradients[:3], dkv_up)])
    return results


def test_latents_agree_with_fp64() -> None:
    cases = [
        replace(PROBLEMS[name], dtype=dtype).on(3, variant)
        for dtype in LIMITS
        for name in NAMES
        for variant in ("ring", "hierarchical")
    ]
    parts = run(3, attend_all, cases, environment=ROUGH).values()
    for i, case in enumerate(cases):
        plan, ranks = case.plan(), [tensors(part[i]) for part in parts]
        whole = [plan.layout.unshard([tensors_of_rank[j] for tensors_of_rank in ranks]) for j in range(4)]
        results = [*whole[:2], whole[2][:, None], whole[3][:, None], ranks[0][4]]
        error = largest_error(case, dict(zip(RESULTS, results, strict=False)))
        assert error < LIMITS[case.dtype], (case, error)
