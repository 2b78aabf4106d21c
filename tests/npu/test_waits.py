"""What asynchronous streams with delays show: missing waits and buffers that are reused too early."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.npu import ranks
from tests.npu.groups import prepared

DELAYS = {"HOST_CANN_JITTER_US": "60000", "HOST_CANN_SEED": "1"}  # 60 ms at most before each task of a stream
TRIES = 6


def receive_and_read(rank: int, size: int) -> tuple[int, int]:
    """How often the receiver saw the old contents before and after wait()."""
    early = late = 0
    prepared(size)
    for attempt in range(TRIES):
        x, y = torch.full((1000,), float(attempt), device="npu"), torch.full((1000,), -1.0, device="npu")
        if rank == 0:
            dist.isend(x, 1).wait()
        else:
            work = dist.irecv(y, 0)
            early += y.cpu().tolist() == [-1.0] * 1000
            work.wait()
            late += y.cpu().tolist() != [float(attempt)] * 1000
        torch.npu.synchronize()
    return early, late


def test_a_receive_buffer_holds_the_message_only_after_wait() -> None:
    _, (early, late) = ranks.run(2, receive_and_read, environment=DELAYS).values()
    assert early > 0
    assert late == 0


def send_and_overwrite(rank: int, size: int, waits: bool) -> int:
    """How many messages did not arrive as they were when they were sent."""
    damaged = 0
    prepared(size)
    for attempt in range(TRIES):
        x, y = torch.full((1000,), float(attempt), device="npu"), torch.empty(1000, device="npu")
        torch.npu.synchronize()
        if rank == 0:
            work = dist.isend(x, 1)
            if waits:
                work.wait()
            x.fill_(-2.0)
            work.wait()
        else:
            dist.irecv(y, 0).wait()
            damaged += y.cpu().tolist() != [float(attempt)] * 1000
        torch.npu.synchronize()
    return damaged


def test_a_send_buffer_may_be_overwritten_only_after_wait() -> None:
    assert ranks.run(2, send_and_overwrite, True, environment=DELAYS).values()[1] == 0
    assert ranks.run(2, send_and_overwrite, False, environment=DELAYS).values()[1] > 0


def send_from_another_stream(rank: int, size: int, waits: bool) -> int:
    """How many messages left before the stream that makes their contents had made them."""
    early = 0
    prepared(size)
    side = torch.npu.Stream()
    for attempt in range(TRIES):
        x, y = torch.full((1000,), -1.0, device="npu"), torch.empty(1000, device="npu")
        torch.npu.synchronize()
        if rank == 0:
            with torch.npu.stream(side):
                x.fill_(float(attempt))
            if waits:
                torch.npu.current_stream().wait_stream(side)
            dist.isend(x, 1).wait()
        else:
            dist.irecv(y, 0).wait()
            early += y.cpu().tolist() != [float(attempt)] * 1000
        torch.npu.synchronize()
    return early


def test_a_message_is_what_its_stream_has_made_only_if_the_current_stream_waits_for_that() -> None:
    late = {**DELAYS, "HOST_CANN_LATE": "1"}
    assert ranks.run(2, send_from_another_stream, True, environment=late).values()[1] == 0
    assert ranks.run(2, send_from_another_stream, False, environment=late).values()[1] > 0


def collective_and_read(rank: int, size: int) -> tuple[int, int]:
    """How often a rank saw its own number in place of the sum, before and after wait()."""
    early = late = 0
    dist.barrier()
    for _ in range(TRIES):
        x = torch.full((1000,), float(rank + 1), device="npu")
        torch.npu.synchronize()
        work = dist.all_reduce(x, async_op=True)
        early += x.cpu().tolist() == [rank + 1] * 1000
        work.wait()
        late += x.cpu().tolist() != [size * (size + 1) / 2] * 1000
    return early, late


def test_a_collective_is_done_only_after_wait() -> None:
    for early, late in ranks.run(3, collective_and_read, environment=DELAYS).values():
        assert early > 0
        assert late == 0
