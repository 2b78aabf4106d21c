"""The CPU mode: Megatron's CUDA calls work inside it and nothing is left of it outside."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mindspeed_cp.megatron import megatron_imports, megatron_on_cpu
from tests.megatron.gpt import one_rank

with megatron_imports():
    from megatron.core import tensor_parallel


def snapshot() -> dict[str, int]:
    """What stands by which name in torch, Tensor and torch.cuda; a name that is inherited is not there."""
    owners = {"torch": torch, "Tensor": torch.Tensor, "cuda": torch.cuda, "random": torch.cuda.random}
    return {f"{owner}.{name}": id(value) for owner, x in owners.items() for name, value in list(vars(x).items())}


def test_cuda_devices_are_the_cpu_inside() -> None:
    with megatron_on_cpu():
        x = torch.ones(3, device="cuda")
        assert x.device.type == "cpu" and x.cuda() is x
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.empty(2, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
        assert x.to("cuda:0").device.type == "cpu" and x.to(device="cuda").device.type == "cpu"
        assert torch.zeros_like(x, device="cuda").device.type == x.new_ones(1, device="cuda:1").device.type == "cpu"
        assert torch.ones(1, device="meta").device.type == x.to("meta").device.type == "meta"
        assert x.to(torch.float64, copy=True).dtype == torch.float64 and x.to(x) is x
        assert x.type() == "torch.cuda.FloatTensor" and x.type(torch.float64).dtype == torch.float64
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            event = stream.record_event()
        event.synchronize()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
    assert x.type() == "torch.FloatTensor"


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_undone(fails: bool) -> None:
    before = snapshot()
    try:
        with megatron_on_cpu():
            assert snapshot() != before
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert snapshot() == before


def test_nested_blocks_are_one() -> None:
    with megatron_on_cpu():
        outer = snapshot()
        with megatron_on_cpu():
            assert snapshot() == outer
            assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert snapshot() == outer
        assert torch.ones(1, device="cuda").device.type == "cpu"


def test_recompute_repeats_dropout_and_queues_nothing() -> None:
    waiting = len(torch.cuda._queued_calls)

    def dropped(x: torch.Tensor) -> Any:
        return torch.nn.functional.dropout(x, 0.5)

    with one_rank():
        x = torch.ones(1000, requires_grad=True)
        out = tensor_parallel.checkpoint(dropped, False, x)
        torch.rand(10)
        out.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, out.detach())
    assert len(torch.cuda._queued_calls) == waiting


def test_what_makes_tensors_takes_a_cuda_device_in_every_thread() -> None:
    """Autograd's own threads, and those of a user, have no function mode of the main thread."""
    devices: list[str] = []
    with megatron_on_cpu():
        thread = threading.Thread(target=lambda: devices.append(torch.zeros(1, device="cuda").device.type))
        thread.start()
        thread.join()
    assert devices == ["cpu"]


def test_every_function_of_torch_that_takes_a_device_is_redirected() -> None:
    """Those that torch itself tells its default device; some of them no part of Megatron calls."""
    from torch.utils._device import _device_constructors

    with megatron_on_cpu():
        constructors = _device_constructors()
        unchanged = {x.__name__ for x in constructors if getattr(torch, x.__name__, None) is x}
        with torch.device("meta"):
            assert torch.zeros(1).device.type == "meta"
    rare = {"empty_permuted", "empty_quantized", "fill", "range", "vander"}  # the list differs between releases
    assert {name for name in unchanged if not name.endswith("_window") and "sparse" not in name} <= rare
