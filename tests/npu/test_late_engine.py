"""The engine where results come late, fresh memory is NaN and sends wait for their receivers; and what becomes of it when
its transport leaves out a wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindspeed_cp.comm.group_transport import GroupTransport, _PendingWork
from tests.engine.cases import Case, worst
from tests.npu.ranks import run, start
from tests.npu.test_table import attend_all, tensors

LATE = {"HOST_CANN_LATE": "1", "HOST_CANN_POISON": "1", "HOST_CANN_JITTER_US": "300", "HOST_CANN_SEED": "7"}
LATE |= {"HOST_HCCL_SYNC": "1"}
LENGTHS = (61, 5, 0, 44, 1, 30)
DIRECTIONAL = {
    2: [Case(LENGTHS, 2), Case(LENGTHS, 2, alibi=True)],
    3: [Case(LENGTHS, 3), Case(LENGTHS, 3, window=(17, 0)), Case(LENGTHS, 3, mask="full")],
}
BATCHED = {
    2: [Case(LENGTHS, 2, heads=6, kv_heads=3, algorithm="ulysses"), Case(LENGTHS, 2, algorithm="direct")],
    3: [Case(LENGTHS, 3), Case(LENGTHS, 3, algorithm="all_gather")],
}


@pytest.mark.parametrize(
    ("directional", "size"),
    [
        (True, 3),
        (False, 2),
        pytest.param(True, 2, marks=pytest.mark.thorough),
        pytest.param(False, 3, marks=pytest.mark.thorough),
    ],
)
def test_attention_agrees_with_fp64(size: int, directional: bool) -> None:
    cases = (DIRECTIONAL if directional else BATCHED)[size]
    parts = run(size, attend_all, cases, directional, environment=LATE).values()
    for number, case in enumerate(cases):
        assert worst(case, [tensors(part[number]) for part in parts]) <= 1e-5, case


def no_wait_for_receives() -> None:
    wait = _PendingWork.wait
    _PendingWork.wait = lambda self: wait(self) if self.transfer.sends else None


def no_wait_for_sends() -> None:
    wait = _PendingWork.wait
    _PendingWork.wait = lambda self: None if self.transfer.sends else wait(self)


def without(
    rank: int, size: int, leave_out: Callable[[], None] | None, late_rank: int, seconds: float, cases: list[Case]
) -> list[list]:
    """`attend_all` over directional groups, where one rank is late at its messages, without a wait of the transport."""
    if leave_out is not None:
        leave_out()
    post = GroupTransport.post

    def late_post(self: GroupTransport, *arguments: Any) -> list[Any]:
        time.sleep(seconds if rank == late_rank else 0)
        return post(self, *arguments)

    GroupTransport.post = late_post  # type: ignore[method-assign]
    return attend_all(rank, size, cases, True)


RING = [Case(LENGTHS, 4)]


def fault_shows(leave_out: Callable[[], None] | None, seconds: float) -> bool:
    """Whether a result is wrong, an operator was given NaN, or a stream saw an input overwritten before it was read."""
    done = start(4, without, leave_out, 2, seconds, RING, environment=LATE)
    errors = [error for error in done.errors if error]
    if errors:  # those of the other ranks follow from the first
        assert any("was overwritten before" in x or "that is not finite" in x for x in errors), errors
        return True
    parts = done.values()
    worst_errors = [worst(case, [tensors(part[i]) for part in parts]) for i, case in enumerate(RING)]
    return not torch.tensor(worst_errors).le(1e-5).all()


def test_with_all_its_waits_the_transport_is_right() -> None:
    assert not fault_shows(None, 0.3)


@pytest.mark.parametrize("leave_out", [no_wait_for_receives, no_wait_for_sends])
def test_a_wait_that_the_transport_leaves_out_is_found(leave_out: Callable[[], None]) -> None:
    """The later the rank, the surer: on a busy machine the others may need longer than its first delays to run ahead."""
    assert any(fault_shows(leave_out, seconds) for seconds in (0.3, 2, 10, 60))
