"""torch_npu's own queue (TASK_QUEUE_ENABLE): who makes the calls, what a wait for it waits for, and where errors come from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu

from tests.host_cann import control, oracle, oracle_abi, task_queue
from tests.limits import HANG
from tests.npu.operators import refused, to_npu

ENDS = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])


@pytest.fixture
def rows() -> Iterator[torch.Tensor]:
    made = torch.randn(12, 2, 16, generator=torch.Generator().manual_seed(0)).to("npu")
    torch.npu.synchronize()
    oracle.calls.clear()
    yield made


def attend(rows: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch_npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", **ENDS, **options)[0]


def test_the_queues_thread_makes_one_phase_of_a_call_or_both(
    rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, handler = [], oracle_abi.handler

    def noting(name: str) -> Any:
        threads.append(threading.get_ident())
        return handler(name)

    monkeypatch.setattr(oracle_abi, "handler", noting)
    attend(rows)
    torch.npu.synchronize()
    caller = threading.get_ident()
    assert [thread == caller for thread in threads] == [[True, True], [True, False], [False, False]][task_queue.mode()]


def test_a_raw_stream_is_given_once_all_calls_are_made_and_waits_for_no_stream(rows: torch.Tensor) -> None:
    side, target, given = torch.npu.Stream(), torch.zeros_like(rows), threading.Event()
    torch.npu.synchronize()

    def release() -> None:
        was_given.append(given.wait(HANG / 10))
        control.release(side)

    was_given: list[bool] = []
    releaser = threading.Thread(target=release)
    control.hold(side)
    releaser.start()
    with torch.npu.stream(side):
        target.copy_(rows)
    attend(rows)
    torch.npu.current_stream().npu_stream  # noqa: B018
    assert [call.operator for call in oracle.calls] == ["fused_attention"]
    given.set()
    releaser.join()
    assert was_given == [True]
    side.synchronize()
    assert torch.equal(target.cpu(), rows.cpu())


def test_waits_for_the_queue_do_not_keep_pythons_lock_from_it(rows: torch.Tensor) -> None:
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    want = attend(rows).cpu()
    for _ in range(20):
        start.record()
        out = attend(rows)
        end.record()
        assert start.elapsed_time(end) >= 0
        attend(rows)
        torch.npu.current_stream().query()
        attend(rows)
        torch.npu.current_stream().npu_stream  # noqa: B018
        attend(rows)
        assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("wait", [True, False])
def test_a_missing_wait_shows_whether_or_not_the_queue_is_emptied(rows: torch.Tensor, wait: bool) -> None:
    """The queue has called the operator, and its stream has not written the result yet."""
    first = attend(rows)  # stays: else the next result would come into its memory, over the same numbers
    want = first.cpu()
    side, current, taken = torch.npu.Stream(), torch.npu.current_stream(), torch.zeros_like(rows)
    torch.npu.synchronize()
    with control.late(), control.operator_held(current, 0.05 if wait else None):
        out = attend(rows)
        current.npu_stream  # noqa: B018
        if wait:
            side.wait_stream(current)
        with torch.npu.stream(side):
            taken.copy_(out)
        side.synchronize()
    torch.npu.synchronize()
    assert torch.equal(taken.cpu(), want) == wait


@pytest.mark.ends_queue(2)
def test_after_a_refusal_in_the_queues_thread_torch_npu_makes_no_call_of_this_process(rows: torch.Tensor) -> None:
    with refused("head sizes must be|Dq == Dk"):
        torch_npu.npu_fusion_attention_v2(rows, to_npu(torch.zeros(12, 2, 8)), rows, 2, "TND", **ENDS)
    attend(rows)
    torch.npu.synchronize()
    assert len(oracle.calls) == (0 if task_queue.mode() == 2 else 1)
