"""An error of torch_npu's queue that nobody was told of, and the check of every step that notices it."""

from __future__ import annotations

import pytest
import torch

from mindspeed_cp.errors import OperatorError
from mindspeed_cp.train.checks import QueueProbe
from mindspeed_cp.train.failures import FAILED, classify_error
from tests.host_cann import task_queue

DEVICE = torch.device("npu", 0)


def lose_error() -> None:
    """Make a call that fails in the queue's thread, and drop the only error, as the destructor of an event does."""
    with pytest.raises(RuntimeError, match=r"FastGelu|fast_gelu"):
        torch.ops.npu.fast_gelu(torch.ones(4, device="npu"))
        task_queue.wait_for_refusal()


def test_numbers_arrive_in_turn() -> None:
    probe = QueueProbe(DEVICE, 0)
    for step in range(1, 14):
        probe.check(step)


@pytest.mark.ends_queue(1, 2)
def test_a_lost_error_is_noticed_though_torch_npu_says_nothing() -> None:
    probe = QueueProbe(DEVICE, 3)
    probe.check(6)
    lose_error()
    if task_queue.mode() == 0:  # there is no queue: calls go on
        probe.check(7)
        return
    torch.npu.synchronize()  # no error
    with pytest.raises(OperatorError, match=r"^step 7, rank 3: torch-npu makes no calls any more") as caught:
        probe.check(7)
    kind, line, code = classify_error(caught.value)
    assert (kind, code) == ("device", FAILED) and f"(now {task_queue.mode()})" in line


def test_other_devices_are_left_alone() -> None:
    QueueProbe(torch.device("cpu"), 0).check(1)
