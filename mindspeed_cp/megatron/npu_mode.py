"""megatron_on: run unmodified Megatron-core, which asks for CUDA, on an Ascend NPU or the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mindspeed_cp.megatron.cpu_mode import megatron_on_cpu
from mindspeed_cp.megatron.cuda_means import AtOnce, CudaMeans
from mindspeed_cp.megatron.swap import replaced

#: What Megatron-core calls of torch.cuda by attribute and torch.npu has under the same name.
_SAME = (
    *("set_device", "synchronize", "empty_cache", "Stream", "Event", "current_stream", "default_stream", "stream"),
    *("set_stream", "get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"),
    *("reset_peak_memory_stats", "mem_get_info", "device"),
)


@contextmanager
def megatron_on_npu(device: torch.device) -> Iterator[None]:
    """Inside this block, what Megatron-core asks of CUDA happens on an NPU.

    No Megatron module is changed. Two things are, and both are undone on exit, errors included: CUDA devices among the
    arguments of torch functions mean `device` (on the entering thread, which must be the main one), and functions of
    torch.cuda that Megatron calls by attribute are those of torch.npu. Programs that already live with
    ``torch_npu.contrib.transfer_to_npu``, which does the like for the whole process and for good, do not need it.

    Args:
        device: "npu" with its number; torch_npu is imported, and the device set.

    Raises:
        RuntimeError: entered in another thread than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "megatron_on_npu was entered in a side thread; enter it in the main thread, around the whole training"
        )
    npu: Any = torch.npu  # type: ignore[attr-defined]
    cuda = torch.cuda
    with ExitStack() as stack:
        for name in _SAME:
            if hasattr(npu, name):
                stack.enter_context(replaced(cuda, name, getattr(npu, name)))
        for owner, name, value in (
            (cuda, "current_device", lambda: device.index or 0),
            (cuda.random, "get_rng_state", npu.get_rng_state),
            (cuda, "default_generators", npu.default_generators),
            (cuda, "_queued_calls", AtOnce()),
        ):
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(CudaMeans(device))
        yield


@contextmanager
def megatron_on(device: torch.device) -> Iterator[None]:
    """megatron_on_npu or megatron_on_cpu."""
    with megatron_on_npu(device) if device.type == "npu" else megatron_on_cpu():
        yield
