"""The engine between two GPUs over NCCL, batched and over directional groups: `make test-cuda GPUS=2`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.isolated_rank import attend_virtually
from mindspeed_cp.comm.directional_groups import open_directional_groups, warm_up
from mindspeed_cp.ops.attention.backends import BACKENDS
from tests.comm.closed_groups import close_directional_groups
from tests.engine.cases import VARIANTS, Case, attend, local, worst

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices are visible"),
]

BASE = Case((700, 0, 131, 5, 398), 2, 4, 2, 64, 64, dtype=torch.bfloat16)
CASES = [BASE.on(2, variant) for variant in VARIANTS]
CASES += [replace(case, alibi=True) for case in CASES[:2]]


def work(rank: int, folder: str, directional: bool) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2)
    if directional:
        open_directional_groups(device="cuda")
    results = []
    for case in CASES:
        plan, leaves, dout = local(rank, case)
        on_gpu = [x.detach().cuda().requires_grad_() for x in leaves]
        warm_up(plan, device="cuda")
        out = attend(case, plan, on_gpu, None)
        results.append([x.detach().cpu() for x in (out, *torch.autograd.grad(out, on_gpu, dout.cuda()))])
    torch.save(results, f"{folder}/{rank}.pt")
    if directional:
        close_directional_groups()
    dist.destroy_process_group()


@pytest.mark.parametrize("directional", [False, True], ids=["batched", "directional"])
def test_two_gpus_agree_with_fp64(tmp_path: Path, directional: bool) -> None:
    mp.spawn(work, (str(tmp_path), directional), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for i, case in enumerate(CASES):
        assert worst(case, [rank[i] for rank in ranks]) <= 2e-2, case


def test_kernels_run_where_their_tensors_are() -> None:
    """Triton launches on the current device, whatever the tensors say."""
    case = replace(BASE, ranks=2, alibi=True)
    inputs = [x.to("cuda:1") for x in case.inputs()]
    torch.cuda.set_device(0)
    made = attend_virtually(case.plan(), *inputs, BACKENDS["cuda"])
    actual = [x.cpu().double() for x in (made.out, made.dq, made.dk, made.dv)]
    for got, want in zip(actual, case.reference(), strict=True):
        assert float((got - want).abs().max()) <= 2**-4 * max(1.0, float(want.abs().max()))
