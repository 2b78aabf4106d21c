"""Run unmodified Megatron-core, which asks for CUDA, on an Ascend NPU or on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mindspeed_cp.megatron.patches.swap import replaced

_CPU = torch.device("cpu")

#: Functions of torch.cuda that Megatron-core calls by attribute and torch.npu has under the same name.
_NPU_FUNCTIONS = (
    *("set_device", "synchronize", "empty_cache", "Stream", "Event", "current_stream", "default_stream", "stream"),
    *("set_stream", "get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"),
    *("reset_peak_memory_stats", "mem_get_info", "device"),
)


@contextmanager
def megatron_on(device: torch.device) -> Iterator[None]:
    """Enter :func:`megatron_on_npu` or :func:`megatron_on_cpu`; on a GPU, Megatron needs neither."""
    if device.type == "cuda":
        yield
        return
    with megatron_on_npu(device) if device.type == "npu" else megatron_on_cpu():
        yield


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run what Megatron-core asks of CUDA on the CPU: model, DDP, optimizers, schedules, recomputation.

    For CPU runs, tests and CI: never for training on an accelerator. No Megatron module is changed. Two things are, and
    both are undone on exit, errors included:

    * every torch function with a CUDA device among its arguments runs on the CPU (one TorchFunctionMode; it acts on the
      entering thread only, which is why this must be the main thread, the one that trains);
    * the few functions of torch.cuda that Megatron-core calls by attribute (current_device, streams, events, random
      state) are replaced.

    Random state is that of the CPU, so Megatron's random tracker, activation recompute and dropout work as on a device.
    Entering it again inside itself does nothing more. Enter it before building the model::

        with megatron_on_cpu(), megatron_compat():
            initialize_model_parallel(context_parallel_size=2)
            ...

    Raises:
        RuntimeError: entered in another thread than the main one.
    """
    present: Any = torch.cuda.Stream
    if present is _Stream:
        yield
        return
    with _redirected(_CPU, "megatron_on_cpu", _cpu_functions()):
        yield


@contextmanager
def megatron_on_npu(device: torch.device) -> Iterator[None]:
    """Run what Megatron-core asks of CUDA on an NPU.

    No Megatron module is changed. Two things are, and both are undone on exit, errors included: CUDA devices among the
    arguments of torch functions mean `device` (on the entering thread, which must be the main one), and functions of
    torch.cuda that Megatron calls by attribute are those of torch.npu. Programs that use
    ``torch_npu.contrib.transfer_to_npu``, which does the same for the whole process and for good, do not need it.

    Args:
        device: "npu" with its number; torch_npu is imported, and the device set.

    Raises:
        RuntimeError: entered in another thread than the main one.
    """
    npu: Any = torch.npu  # type: ignore[attr-defined]
    cuda = torch.cuda
    functions = [
        *((cuda, name, getattr(npu, name)) for name in _NPU_FUNCTIONS if hasattr(npu, name)),
        (cuda, "current_device", lambda: device.index or 0),
        (cuda.random, "get_rng_state", npu.get_rng_state),
        (cuda, "default_generators", npu.default_generators),
    ]
    with _redirected(device, "megatron_on_npu", functions):
        yield


@contextmanager
def _redirected(device: torch.device, caller: str, functions: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace functions (module, name, value) and CUDA devices within the block."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{caller} was entered in a side thread; enter it in the main thread, around the whole training"
        )
    with ExitStack() as stack:
        for module, name, value in (*functions, (torch.cuda, "_queued_calls", ImmediateQueue())):
            stack.enter_context(replaced(module, name, value))
        stack.enter_context(CudaRedirect(device))
        yield


class CudaRedirect(TorchFunctionMode):
    """Replaces CUDA devices among the arguments of torch functions by `device`, on the entering thread only."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._pins = device.type != "cpu"  # the CPU has no pinned memory
        self._module = "torch." if device.type == "cpu" else f"torch.{device.type}."  # of names of tensor types

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # every torch call passes here, so nothing is looked at twice
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if func is torch.device:
            return self._device if any(map(_is_cuda, (*args, *kwargs.values()))) else func(*args, **kwargs)
        if kwargs:
            kwargs = {name: self._device if _is_cuda(x) else x for name, x in kwargs.items()}
            if type(kwargs.get("device")) is int:  # torch.cuda.current_device()
                kwargs["device"] = self._device
            if kwargs.get("pin_memory") and not self._pins:
                kwargs["pin_memory"] = False
        for x in args:
            if (type(x) is str or type(x) is torch.device) and _is_cuda(x):
                args = tuple(self._device if _is_cuda(x) else x for x in args)
                break
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str) and result.startswith(self._module):
            # Megatron's optimizers sort parameters by names such as torch.cuda.FloatTensor.
            return result.replace(self._module, "torch.cuda.", 1)
        return result


class ImmediateQueue(list[Any]):
    """Runs at once the calls that torch.cuda would keep until CUDA starts, which it never does.

    Megatron's random tracker sets its state through them; kept, they would pile up with every recomputed layer.
    """

    def append(self, item: tuple[Callable[[], None], Any]) -> None:
        item[0]()


def _is_cuda(x: object) -> bool:
    if isinstance(x, str):
        return x == "cuda" or x.startswith("cuda:")
    return isinstance(x, torch.device) and x.type == "cuda"


class _Event:
    """An event on the CPU, where all work is done when it is issued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _done(self, *args: Any, **kwargs: Any) -> None:
        return None

    synchronize = wait = record = _done

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


class _Stream(_Event):
    """A stream on the CPU: work runs at once."""

    wait_stream = wait_event = _Event._done

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _AnyIndex:
    """torch.cuda.default_generators with the CPU's generator for every device."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator


def _cpu_functions() -> list[tuple[Any, str, Any]]:
    """Return (module, name, value) of the functions of torch.cuda that the CPU replaces."""

    def nothing() -> Callable[..., None]:
        # A new function for each name, as the tables of torch.compile refuse two names of one function.
        return lambda *args, **kwargs: None

    def state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    stream = _Stream()
    cuda = torch.cuda
    return [
        (cuda, "current_device", lambda: _CPU),
        (cuda, "set_device", nothing()),
        (cuda, "synchronize", nothing()),
        (cuda, "empty_cache", nothing()),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Event),
        (cuda, "current_stream", lambda *args: stream),
        (cuda, "default_stream", lambda *args: stream),
        (cuda, "stream", lambda *args: nullcontext()),
        (cuda, "set_stream", nothing()),
        (cuda, "get_rng_state", state),
        (cuda.random, "get_rng_state", state),
        (cuda, "set_rng_state", set_state),
        (cuda, "manual_seed", seed),
        (cuda, "default_generators", _AnyIndex()),
    ]
