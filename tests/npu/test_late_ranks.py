"""Late results and ProcessGroupHCCL: a send reads what the stream writes, however late that is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.npu.ranks import run

LATE = {"HOST_CANN_LATE": "1", "HOST_CANN_POISON": "1", "HOST_CANN_JITTER_US": "500", "HOST_CANN_SEED": "3"}


def ring(rank: int, size: int, rounds: int) -> list[float]:
    """Each round a number is computed, sent on, and added to what comes; then all sum up."""
    value, seen = torch.full((1000,), float(rank + 1), device="npu"), []
    for _ in range(rounds):
        sent, came = value * 2, torch.empty_like(value)
        ops = [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, came, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        value = came + 1
        total = value.clone()
        dist.all_reduce(total)
        seen.append(total.mean().item())
    return seen


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_a_ring_of_late_results_is_right(size: int) -> None:
    expected, values = [], [float(rank + 1) for rank in range(size)]
    for _ in range(4):
        values = [values[rank - 1] * 2 + 1 for rank in range(size)]
        expected.append(sum(values))
    assert run(size, ring, 4, environment=LATE).values() == [expected] * size
