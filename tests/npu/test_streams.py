"""Streams of the stand-in are asynchronous, so that a missing wait, a reused buffer or a late error shows, as on a device.

Every test that needs a wait is also run without it, and must go wrong then.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.host_cann import control

N = 1000
LATE = 0.05  # seconds that a held-up task is late


def filled(value: float) -> torch.Tensor:
    tensor = torch.full((N,), float(value), device="npu")
    torch.npu.synchronize()
    return tensor


def late_copy(stream: torch.npu.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
    """A copy on `stream` that does not happen at once."""
    control.delay(stream, LATE)
    with torch.npu.stream(stream):
        target.copy_(source)


def wait_stream(side: torch.npu.Stream) -> None:
    torch.npu.current_stream().wait_stream(side)


def wait_event(side: torch.npu.Stream) -> None:
    event = torch.npu.Event()
    event.record(side)
    torch.npu.current_stream().wait_event(event)


def synchronize_event(side: torch.npu.Stream) -> None:
    side.record_event().synchronize()


def synchronize_stream(side: torch.npu.Stream) -> None:
    side.synchronize()


def synchronize_device(side: torch.npu.Stream) -> None:
    torch.npu.synchronize()


def no_wait(side: torch.npu.Stream) -> None:
    pass


WAITS = [wait_stream, wait_event, synchronize_event, synchronize_stream, synchronize_device]


@pytest.mark.parametrize("wait", WAITS)
def test_a_copy_on_another_stream_is_seen_after_a_wait(wait: Callable[[torch.npu.Stream], None]) -> None:
    side, target, source = torch.npu.Stream(), filled(1), filled(2)
    late_copy(side, target, source)
    wait(side)
    assert target.sum().item() == 2 * N


def test_a_copy_on_another_stream_is_not_seen_without_a_wait() -> None:
    side, target, source = torch.npu.Stream(), filled(1), filled(2)
    with control.held(side):
        with torch.npu.stream(side):
            target.copy_(source)
        assert target.sum().item() == N
    torch.npu.synchronize()
    assert target.sum().item() == 2 * N


def two_streams(wait_before: bool, wait_after: bool) -> float:
    """The main stream makes x, a side stream copies it twice, the main stream sums the copy: two waits are needed.

    What is late is always the same: the main stream's work until the side stream had its chance, the second copy until
    the main stream had its.
    """
    side, main = torch.npu.Stream(), torch.npu.current_stream()
    x, middle, copied = filled(1), filled(0), filled(0)
    control.hold(main)
    x.copy_(torch.full((N,), 3.0).pin_memory(), non_blocking=True)
    if wait_before:
        side.wait_stream(main)
    with torch.npu.stream(side):
        middle.copy_(x)
    if not wait_before:
        side.synchronize()
    control.release(main)
    with control.held(side, LATE if wait_after else None), torch.npu.stream(side):
        copied.copy_(middle)
        if wait_after:
            main.wait_stream(side)
        with torch.npu.stream(main):
            return copied.sum().item()


@pytest.mark.parametrize(
    ("before", "after", "value"),
    [(True, True, 3 * N), (False, True, N), (True, False, 0), (False, False, 0)],
    ids=["both waits", "first missing", "second missing", "both missing"],
)
def test_each_of_two_waits_decides_the_result(before: bool, after: bool, value: float) -> None:
    assert two_streams(before, after) == value


@pytest.mark.parametrize("seed", range(3))
def test_waits_suffice_under_random_delays_and_their_absence_is_found(seed: int) -> None:
    def relay(waits: bool) -> float:
        """A number is handed through copies on two streams, back and forth."""
        streams = [torch.npu.Stream(), torch.npu.Stream()]
        cells = [filled(0) for _ in range(30)]
        cells[0].fill_(7)
        torch.npu.synchronize()
        control.jitter(1000, seed)
        if not waits:
            control.hold(streams[1])
        for i in range(1, len(cells)):
            stream, before = streams[i % 2], streams[1 - i % 2]
            if waits:
                stream.wait_stream(before)
            with torch.npu.stream(stream):
                cells[i].copy_(cells[i - 1])
        if not waits:
            streams[0].synchronize()
            control.release(streams[1])
        torch.npu.synchronize()
        return cells[-1].mean().item()

    assert relay(waits=True) == 7
    assert relay(waits=False) == 0


def test_a_stream_runs_while_another_is_held_up() -> None:
    slow, fast = torch.npu.Stream(), torch.npu.Stream()
    targets, source = [filled(0), filled(0)], filled(1)
    with control.held(slow):
        for stream, target in zip((slow, fast), targets, strict=True):
            with torch.npu.stream(stream):
                target.copy_(source)  # enqueueing waits for nothing
        fast.synchronize()
        assert fast.query() and not slow.query()
        assert [target[0].item() for target in targets] == [0, 1]
    torch.npu.synchronize()
    assert slow.query() and targets[0][0].item() == 1


def test_tasks_of_a_stream_keep_their_order() -> None:
    stream, target = torch.npu.Stream(), filled(0)
    sources = [filled(i) for i in range(20)]
    control.jitter(500)
    with torch.npu.stream(stream):
        for source in sources:
            target.copy_(source)
    stream.synchronize()
    assert target[0].item() == 19


def test_an_event_is_done_when_what_was_before_it_is_and_measures_time() -> None:
    stream = torch.npu.Stream()
    first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    assert first.query()  # never recorded: nothing to wait for
    first.record(stream)
    with control.held(stream):
        control.delay(stream, LATE)
        last.record(stream)
        assert not last.query()
    last.synchronize()
    assert last.query() and first.elapsed_time(last) >= LATE * 1000


def test_a_wait_is_for_the_record_that_was_there_at_the_call() -> None:
    first, two = torch.npu.Stream(), torch.npu.Stream()
    event, target, source = torch.npu.Event(), filled(0), filled(1)
    event.record(first)
    two.wait_event(event)
    with control.held(first):
        event.record(first)  # a later record, which never comes in this block
        with torch.npu.stream(two):
            target.copy_(source)
        two.synchronize()
        assert target.sum().item() == N


def test_copies_from_pinned_memory_are_late_and_from_other_memory_are_not() -> None:
    pinned, plain = torch.ones(N).pin_memory(), torch.ones(N)
    targets = filled(0), filled(0)
    with control.held(torch.npu.current_stream()):
        targets[0].copy_(pinned, non_blocking=True)
        pinned.fill_(5)  # too early
    targets[1].copy_(plain)
    plain.fill_(5)  # the call has read it
    assert [target[0].item() for target in targets] == [5, 1]


def test_copies_to_pinned_memory_are_late() -> None:
    source = filled(3)
    with control.held(torch.npu.current_stream()):
        result = source.to("cpu", non_blocking=True)
        assert result.is_pinned()
        result.fill_(0)
    torch.npu.current_stream().synchronize()
    assert result.sum().item() == 3 * N


@pytest.mark.parametrize(("wait", "value"), [(wait_stream, 1), (no_wait, 9)], ids=["wait", "no wait"])
def test_a_buffer_that_is_written_before_its_reader_is_done_gives_wrong_data(
    wait: Callable[[torch.npu.Stream], None], value: float
) -> None:
    side, buffer, result = torch.npu.Stream(), filled(1), filled(0)
    with control.held(side, LATE if wait is wait_stream else None):
        with torch.npu.stream(side):
            result.copy_(buffer)
        wait(side)
        buffer.fill_(9)
    torch.npu.synchronize()
    assert result.mean().item() == value


@pytest.mark.parametrize("kept", [True, False], ids=["record_stream", "no record_stream"])
def test_memory_that_is_freed_while_another_stream_reads_it(kept: bool) -> None:
    side, result = torch.npu.Stream(), filled(0)
    buffer = filled(1)
    address = buffer.data_ptr()
    with control.held(side):
        with torch.npu.stream(side):
            result.copy_(buffer)
        if kept:
            buffer.record_stream(side)
        del buffer  # the allocator may give it to the next tensor
        other = torch.empty(N, device="npu")
        other.fill_(9)
        assert (other.data_ptr() == address) is not kept
    torch.npu.synchronize()
    assert result.mean().item() == (1 if kept else 9)


def test_memory_that_was_recorded_comes_back_when_the_stream_is_done() -> None:
    side, result = torch.npu.Stream(), filled(0)
    buffer = filled(1)
    address = buffer.data_ptr()
    with torch.npu.stream(side):
        result.copy_(buffer)
    buffer.record_stream(side)
    del buffer
    torch.npu.synchronize()
    assert torch.empty(N, device="npu").data_ptr() == address


@pytest.mark.parametrize("wait", [synchronize_stream, synchronize_device])
def test_a_failed_task_raises_at_the_next_synchronize_and_not_before(wait: Callable[[torch.npu.Stream], None]) -> None:
    side, target, source = torch.npu.Stream(), filled(0), filled(1)
    control.fail(side, 507015, "the third cube overheated")
    with torch.npu.stream(side):
        target.copy_(source)  # enqueueing says nothing
    with pytest.raises(RuntimeError, match="507015") as caught:
        wait(side)
    assert "the third cube overheated" in str(caught.value)
    wait(side)  # told once
    assert target.sum().item() == N


def test_of_several_failed_tasks_the_first_is_told() -> None:
    side = torch.npu.Stream()
    control.fail(side, 507015, "first")
    control.fail(side, 507014, "second")
    with pytest.raises(RuntimeError, match="first"):
        side.synchronize()


def test_an_operator_on_a_stream_with_a_failed_task_raises() -> None:
    control.fail(torch.npu.current_stream(), 507015, "lost")
    with pytest.raises(RuntimeError, match=r"an earlier task of the current stream failed, error code 507015: lost"):
        torch.zeros(3, device="npu")
    with pytest.raises(RuntimeError, match="lost"):
        torch.npu.synchronize()


def test_a_failure_on_one_device_is_nothing_to_another() -> None:
    with torch.npu.device(1):
        side = torch.npu.Stream()
    control.fail(side, 507015, "device one")
    torch.npu.synchronize(0)
    with pytest.raises(RuntimeError, match="device one"):
        torch.npu.synchronize(1)


@pytest.mark.parametrize("wait", WAITS)
def test_waiting_lets_other_threads_run(wait: Callable[[torch.npu.Stream], None]) -> None:
    side, result, source = torch.npu.Stream(), filled(0), filled(1)
    with control.held(side, LATE):  # a Python thread opens it, which needs the interpreter's lock
        with torch.npu.stream(side):
            result.copy_(source)
        wait(side)
        assert result[0].item() == 1


def test_jitter_delays_every_task() -> None:
    stream = torch.npu.Stream()
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    control.jitter(4000, seed=1)
    start.record(stream)
    for _ in range(20):
        control.delay(stream, 0)
    end.record(stream)
    end.synchronize()
    assert start.elapsed_time(end) > 10  # of 21 draws between 0 and 4 ms; the draws are the same in every run
