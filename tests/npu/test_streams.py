"""Streams of the stand-in are asynchronous, so that a missing wait, a reused buffer or a late error shows, as on a device.

Every test that needs a wait is also run without it, and must go wrong then. HOST_CANN_LATE makes the results of operators
late, too: `tests.host_cann.control.late`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.host_cann import control, oracle
from tests.npu.operators import refused

N = 1000
LATE = 0.05  # seconds that a held-up task is late
Wait = Callable[[torch.npu.Stream], None]


def filled(value: float) -> Tensor:
    tensor = torch.full((N,), float(value), device="npu")
    torch.npu.synchronize()
    return tensor


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


WAITS = [wait_stream, wait_event, synchronize_event, synchronize_stream, synchronize_device]


@pytest.mark.parametrize("wait", WAITS)
def test_a_copy_on_another_stream_is_seen_after_a_wait_which_lets_other_threads_run(wait: Wait) -> None:
    side, target, source = torch.npu.Stream(), filled(1), filled(2)
    with control.held(side, LATE):  # a Python thread opens it, which needs the interpreter's lock
        with torch.npu.stream(side):
            target.copy_(source)
        wait(side)
        assert target.sum().item() == 2 * N


def test_a_stream_runs_while_another_is_held_up_and_its_work_is_not_seen_without_a_wait() -> None:
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


def test_copies_of_pinned_memory_are_late_and_of_other_memory_are_not() -> None:
    pinned, plain, source = torch.ones(N).pin_memory(), torch.ones(N), filled(3)
    targets = filled(0), filled(0)
    with control.held(torch.npu.current_stream()):
        targets[0].copy_(pinned, non_blocking=True)
        pinned.fill_(5)  # too early
        back = source.to("cpu", non_blocking=True)
        assert back.is_pinned()
        back.fill_(0)  # too early
    targets[1].copy_(plain)
    plain.fill_(5)  # the call has read it
    assert [target[0].item() for target in targets] == [5, 1] and back.sum().item() == 3 * N


@pytest.mark.parametrize("waits", [True, False])
def test_a_buffer_that_is_written_before_its_reader_is_done_gives_wrong_data(waits: bool) -> None:
    side, buffer, result = torch.npu.Stream(), filled(1), filled(0)
    with control.held(side, LATE if waits else None):
        with torch.npu.stream(side):
            result.copy_(buffer)
        if waits:
            wait_stream(side)
        buffer.fill_(9)
    torch.npu.synchronize()
    assert result.mean().item() == (1 if waits else 9)


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


@pytest.mark.parametrize("wait", [synchronize_stream, synchronize_device])
def test_the_first_failed_task_raises_at_the_next_synchronize_and_not_before(wait: Wait) -> None:
    side, target, source = torch.npu.Stream(), filled(0), filled(1)
    control.fail(side, 507015, "the third cube overheated")
    control.fail(side, 507014, "second")
    with torch.npu.stream(side):
        target.copy_(source)  # enqueueing says nothing
    with pytest.raises(RuntimeError, match="507015") as caught:
        wait(side)
    assert "the third cube overheated" in str(caught.value)
    wait(side)  # told once
    assert target.sum().item() == N


# fused operators: after what their own stream had to do, and before what another has


def attend(rows: Tensor) -> Tensor:
    ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])
    return torch_npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", **ends)[0]


@pytest.fixture
def old_and_new() -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """Old rows and others that come into their place; what attention makes of each."""
    both = torch.randn(2, 12, 2, 16, generator=torch.Generator().manual_seed(0))
    ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])
    results = [oracle.fused_attention(x, x, x, 2, "TND", **ends)[0] for x in both]
    rows, source = (x.clone().to("npu") for x in both)
    torch.npu.synchronize()
    yield rows, source, results


@pytest.mark.parametrize("waits", [True, False])
def test_attention_sees_what_another_stream_writes_after_a_wait_alone(
    waits: bool, old_and_new: tuple[Tensor, Tensor, list[Tensor]]
) -> None:
    (rows, source, (old, new)), side = old_and_new, torch.npu.Stream()
    with control.held(side, LATE if waits else None):
        with torch.npu.stream(side):
            rows.copy_(source)
        if waits:
            wait_stream(side)
        assert torch.equal(attend(rows).cpu(), new if waits else old)
    side.synchronize()
    assert torch.equal(attend(rows).cpu(), new)


def test_contents_are_not_looked_at_before_their_time(old_and_new: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    """A mask that is still on its way, and wrong until then, is no reason to refuse the call."""
    upper = torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu")
    mask, rows = torch.zeros_like(upper), old_and_new[0]
    torch.npu.synchronize()
    control.delay(torch.npu.current_stream(), LATE)
    mask.copy_(upper, non_blocking=True)
    call = dict(sparse_mode=3, atten_mask=mask, actual_seq_qlen=[12], actual_seq_kvlen=[12])
    torch_npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", **call)
    mask.zero_()
    with refused("507015[^$]*must be 1 above the diagonal"):
        torch_npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", **call)
    attend(rows)  # calls go on
    torch.npu.synchronize()


# results that come late


@pytest.fixture
def late() -> Iterator[None]:
    with control.late():
        yield


def test_new_results_are_late(late: None) -> None:
    side, main = torch.npu.Stream(), torch.npu.current_stream()
    x, copied = filled(1), filled(0)
    address = filled(7).data_ptr()  # freed: the next tensor of this size gets it
    with control.operator_held(main):
        y = x * 5
        assert y.data_ptr() == address
        with torch.npu.stream(side):
            copied.copy_(y)
        side.synchronize()
    assert (copied[0].item(), y[0].item()) == (7, 5)


@pytest.mark.parametrize("waits", [True, False])
def test_an_input_that_is_overwritten_before_the_operator_ran_is_told(waits: bool, late: None) -> None:
    """What lies beside it may change."""
    side, stream = torch.npu.Stream(), torch.npu.Stream()
    x, buffer, other = filled(1), torch.cat([filled(2), filled(0)]), filled(3)
    torch.npu.synchronize()
    with torch.npu.stream(stream), control.operator_held(stream, LATE if waits else None):
        total = x.view(10, -1)[:, ::2] + buffer[:N].view(10, -1)[:, 1::2]
        if waits:
            side.wait_stream(stream)
        with torch.npu.stream(side):
            buffer[N if waits else 0 :][:N].copy_(other)
        side.synchronize()
    if waits:
        stream.synchronize()
        assert total.sum().item() == 3 * N / 2
    else:
        with pytest.raises(RuntimeError, match=r"input 1 of aten::add was overwritten before the operator ran"):
            stream.synchronize()


def test_rows_of_attention_that_are_overwritten_too_early_are_told(
    late: None, old_and_new: tuple[Tensor, Tensor, list[Tensor]]
) -> None:
    rows, source, _ = old_and_new
    stream, side = torch.npu.Stream(), torch.npu.Stream()
    with torch.npu.stream(stream), control.operator_held(stream):
        attend(rows)
        with torch.npu.stream(side):
            rows.copy_(source, non_blocking=True)
        side.synchronize()
    with pytest.raises(RuntimeError, match="input 0 of aclnnFlashAttentionVarLenScoreV2 was overwritten"):
        stream.synchronize()
