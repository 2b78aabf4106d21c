"""What asynchronous streams show: missing waits and buffers that are reused too early.

A stream is held until the rank without a wait has read or written too early, so the damage is certain. Where a rank
waits, the stream is held for a moment, which is time enough for what does not wait.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.npu import ranks
from tests.npu.groups import prepared

MOMENT = 0.06  # seconds
LATE = {"HOST_CANN_LATE": "1"}


def new(value: float) -> torch.Tensor:
    x = torch.full((1000,), value, device="npu")
    torch.npu.synchronize()
    return x


def is_filled(x: torch.Tensor, value: float) -> bool:
    return x.cpu().tolist() == [value] * 1000


def receive_and_read(rank: int, size: int) -> tuple[bool, bool]:
    """Whether the receiver sees the old contents before wait(), and the message after it."""
    from tests.host_cann import control

    prepared(size)
    x, y, side = new(3.0), new(-1.0), torch.npu.Stream()
    if rank == 0:
        dist.isend(x, 1).wait()
        return True, True
    with control.held(side):
        with torch.npu.stream(side):
            work = dist.irecv(y, 0)
        is_old = is_filled(y, -1.0)
    work.wait()
    return is_old, is_filled(y, 3.0)


def test_a_receive_buffer_holds_the_message_only_after_wait() -> None:
    assert ranks.run(2, receive_and_read).values() == [(True, True)] * 2


def send_and_overwrite(rank: int, size: int, waits: bool) -> bool:
    """Whether the message arrives as it was when it was sent."""
    from tests.host_cann import control

    prepared(size)
    x, y, side = new(3.0), new(-1.0), torch.npu.Stream()
    if rank == 1:
        dist.irecv(y, 0).wait()
        return is_filled(y, 3.0)
    with control.held(side, MOMENT if waits else None):
        with torch.npu.stream(side):
            work = dist.isend(x, 1)
        if waits:
            work.wait()
        x.fill_(-2.0)
        torch.npu.current_stream().synchronize()
    work.wait()
    return True


def test_a_send_buffer_may_be_overwritten_only_after_wait() -> None:
    assert ranks.run(2, send_and_overwrite, True).values() == [True, True]
    assert ranks.run(2, send_and_overwrite, False).values() == [True, False]


def send_from_another_stream(rank: int, size: int, waits: bool) -> bool:
    """Whether the message leaves after the stream that makes its contents has made them."""
    from tests.host_cann import control

    prepared(size)
    x, y, side = new(-1.0), new(-1.0), torch.npu.Stream()
    if rank == 1:
        dist.irecv(y, 0).wait()
        return is_filled(y, 3.0)
    with control.operator_held(side, MOMENT if waits else None):
        with torch.npu.stream(side):
            x.fill_(3.0)
        if waits:
            torch.npu.current_stream().wait_stream(side)
        dist.isend(x, 1).wait()
        torch.npu.current_stream().synchronize()
    return True


def test_a_message_is_what_its_stream_has_made_only_if_the_current_stream_waits_for_that() -> None:
    assert ranks.run(2, send_from_another_stream, True, environment=LATE).values() == [True, True]
    assert ranks.run(2, send_from_another_stream, False, environment=LATE).values() == [True, False]


def collective_and_read(rank: int, size: int) -> tuple[bool, bool]:
    """Whether a rank sees its own number before wait(), and the sum after it."""
    from tests.host_cann import control

    dist.barrier()
    x, side = new(float(rank + 1)), torch.npu.Stream()
    with control.held(side):
        with torch.npu.stream(side):
            work = dist.all_reduce(x, async_op=True)
        is_own = is_filled(x, float(rank + 1))
    work.wait()
    return is_own, is_filled(x, size * (size + 1) / 2)


def test_a_collective_is_done_only_after_wait() -> None:
    assert ranks.run(3, collective_and_read).values() == [(True, True)] * 3
