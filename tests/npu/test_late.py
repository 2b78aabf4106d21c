"""HOST_CANN_LATE=1: results of ordinary operators come late, and whoever uses or overwrites something too early is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.host_cann import control
from tests.npu.test_aten import CASES, on, train

N = 1000


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    with control.late():
        yield


def filled(value: float) -> torch.Tensor:
    tensor = torch.full((N,), float(value), device="npu")
    torch.npu.synchronize()
    return tensor


@pytest.mark.parametrize("wait", [True, False])
def test_a_result_that_another_stream_reads_without_a_wait_is_not_there(wait: bool) -> None:
    side, main = torch.npu.Stream(), torch.npu.current_stream()
    x, copied = filled(1), filled(0)
    with control.operator_held(main, None if not wait else 0.05):
        x.mul_(5)
        if wait:
            side.wait_stream(main)
        with torch.npu.stream(side):
            copied.copy_(x)
        side.synchronize()
    assert copied[0].item() == (5 if wait else 1)
    assert x[0].item() == 5


def test_new_results_are_late_too() -> None:
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


@pytest.mark.parametrize("wait", [True, False])
def test_an_input_that_is_overwritten_before_the_operator_ran_is_told(wait: bool) -> None:
    side, main = torch.npu.Stream(), torch.npu.current_stream()
    x, y, other = filled(1), filled(2), filled(3)
    with control.operator_held(main, 0.05 if wait else None):
        total = x.view(10, -1)[:, ::2] + y.view(10, -1)[:, 1::2]
        if wait:
            side.wait_stream(main)
        with torch.npu.stream(side):
            y.copy_(other)
        side.synchronize()
    if wait:
        assert total.sum().item() == 3 * N / 2
    else:
        with pytest.raises(RuntimeError, match=r"input 1 of aten::add was overwritten before the operator ran"):
            main.synchronize()


def test_what_lies_beside_an_input_may_change() -> None:
    side, main = torch.npu.Stream(), torch.npu.current_stream()
    buffer, other = filled(1), filled(3)
    with control.operator_held(main):
        total = buffer[: N // 2] * 2
        with torch.npu.stream(side):
            buffer[N // 2 :].copy_(other[: N // 2])
        side.synchronize()
    assert total.sum().item() == N and buffer.sum().item() == 2 * N


@pytest.mark.parametrize("name", CASES)
def test_operator_groups_equal_the_cpu(name: str) -> None:
    control.jitter(50)
    for a, b in zip(on("cpu", CASES[name]), on("npu", CASES[name]), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    torch.npu.synchronize()


def test_training_equals_the_cpu() -> None:
    expected, given = train("cpu", "AdamW", 2), train("npu", "AdamW", 2)
    torch.testing.assert_close(torch.tensor(given), torch.tensor(expected), rtol=1e-4, atol=1e-5)
