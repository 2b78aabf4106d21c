"""Values, checks and groups that tests of HCCL share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

SIZES = pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.thorough), 3, pytest.param(4, marks=pytest.mark.thorough)]
)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
REDUCED = [*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64]
MOVED = [*REDUCED, torch.float64, torch.uint8, torch.bool]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.device.type == "npu" and got.dtype == want.dtype
    assert torch.equal(got.cpu(), want), (got.cpu(), want)


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, others on each rank: their sums are exact in every type."""
    made = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(rank))
    return made.to(dtype)


def prepared(size: int) -> dist.ProcessGroup:
    """A second group; on it and on the default one, the communicators of all pairs, made in one order by all ranks."""
    other, rank = dist.new_group(backend="hccl"), dist.get_rank()
    x = torch.zeros(1, device="npu")
    for group in (None, other):
        for a in range(size):
            for b in range(a + 1, size):
                if rank == a:
                    dist.isend(x, b, group=group).wait()
                elif rank == b:
                    dist.irecv(x, a, group=group).wait()
    torch.npu.synchronize()
    return other
