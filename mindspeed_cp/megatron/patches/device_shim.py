"""Run unmodified Megatron-core, which asks for CUDA, on an Ascend NPU or on the CPU.

Functions and methods of torch that take a device are replaced by ones that take another for a CUDA device. A
TorchFunctionMode would do the same for every torch function there is, and runs Python around every call of one. These
replacements run only where a tensor is made or moved, or asked for its type; operators are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch.utils._device import _device_constructors

from mindspeed_cp.megatron.patches.compat import replaced

#: Functions of torch that take the keyword `device`; Megatron-core makes all its tensors by them.
_FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    *("randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
)

#: Methods of a tensor that take the keyword `device`.
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def is_cuda(x: object) -> bool:
    """Return True for a CUDA device, or its name."""
    if isinstance(x, str):
        return x == "cuda" or x.startswith("cuda:")
    return isinstance(x, torch.device) and x.type == "cuda"


def redirected_functions(device: torch.device) -> list[tuple[Any, str, Any]]:
    """Return (owner, name, value) of the functions and methods that put tensors on `device` where CUDA is asked for.

    They also drop ``pin_memory=True`` on the CPU, which has no pinned memory, and name tensors of `device` as those of
    CUDA: Megatron's optimizers sort parameters by names such as torch.cuda.FloatTensor.
    """
    _device_constructors()  # torch collects them once, to tell them its default device: the functions, not replacements
    by_keyword = [(torch, name) for name in _FACTORIES] + [(torch.Tensor, name) for name in _METHODS]
    return [
        *((owner, name, _by_keyword(getattr(owner, name), device)) for owner, name in by_keyword),
        (torch.Tensor, "to", redirected(torch.Tensor.to, device, first=1)),
        (torch.Tensor, "cuda", _cuda(device)),
        (torch.Tensor, "type", _type(device)),
    ]


def redirected(function: Callable[..., Any], device: torch.device, first: int = 0) -> Callable[..., Any]:
    """Return a function that takes `device` for a CUDA device as argument number `first` or as keyword `device`."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > first and is_cuda(args[first]):
            args = (*args[:first], device, *args[first + 1 :])
        elif kwargs and is_cuda(kwargs.get("device")):
            kwargs["device"] = device
        return function(*args, **kwargs)

    return call


def _by_keyword(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function that makes a tensor with `device` for a CUDA device, or its number, as keyword `device`."""
    has_pinned_memory = device.type != "cpu"

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            given = kwargs.get("device")
            if given is device or given is None:
                pass
            elif type(given) is int or is_cuda(given):  # int: torch.cuda.current_device()
                kwargs["device"] = device
            if not has_pinned_memory and kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def _cuda(device: torch.device) -> Callable[..., Any]:
    """Return Tensor.cuda, which moves a tensor to `device`."""

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.to(device)

    return cuda


def _type(device: torch.device) -> Callable[..., Any]:
    """Return Tensor.type, which names tensors of `device` as those of CUDA."""
    original = torch.Tensor.type
    module = "torch." if device.type == "cpu" else f"torch.{device.type}."

    @wraps(original)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and result.startswith(module):
            return result.replace(module, "torch.cuda.", 1)
        return result

    return call


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

    For CPU runs, tests and CI: never for training on an accelerator. No Megatron module is changed. Two things are, for
    the whole process, and both are undone on exit, errors included:

    * functions of torch that make tensors, and the methods of a tensor that move it or name its type, take the CPU for
      a CUDA device (:mod:`mindspeed_cp.megatron.patches.device_shim`); no other torch function is touched;
    * the few functions of torch.cuda that Megatron-core calls by attribute (current_device, streams, events, random
      state) are replaced.

    Random state is that of the CPU, so Megatron's random tracker, activation recompute and dropout work as on a device.
    Entering it again inside itself does nothing more. Enter it before building the model::

        with megatron_on_cpu(), megatron_compat():
            initialize_model_parallel(context_parallel_size=2)
            ...
    """
    present: Any = torch.cuda.Stream
    if present is _Stream:
        yield
        return
    with _redirected(_CPU, _cpu_functions()):
        yield


@contextmanager
def megatron_on_npu(device: torch.device) -> Iterator[None]:
    """Run what Megatron-core asks of CUDA on an NPU, as :func:`megatron_on_cpu` does on the CPU.

    Functions of torch.cuda are those of torch.npu. Programs that use ``torch_npu.contrib.transfer_to_npu``, which does
    the same for the whole process and for good, do not need it.

    Args:
        device: "npu" with its number; torch_npu is imported, and the device set.
    """
    npu: Any = torch.npu  # type: ignore[attr-defined]
    cuda = torch.cuda
    functions = [
        *((cuda, name, _on_npu(npu, name, device)) for name in _NPU_FUNCTIONS if hasattr(npu, name)),
        (cuda, "current_device", lambda: device.index or 0),
        (cuda.random, "get_rng_state", _on_npu(npu, "get_rng_state", device)),
        (cuda, "default_generators", npu.default_generators),
    ]
    with _redirected(device, functions):
        yield


def _on_npu(npu: Any, name: str, device: torch.device) -> Any:
    """Return a function of torch.npu that takes `device` for a CUDA device, or a class as it is."""
    value = getattr(npu, name)
    if isinstance(value, type):
        return value
    return redirected(value, device, first=int(name == "set_rng_state"))


@contextmanager
def _redirected(device: torch.device, functions: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace functions (module, name, value) and CUDA devices within the block."""
    with ExitStack() as stack:
        queue = (torch.cuda, "_queued_calls", ImmediateQueue())
        for owner, name, value in (*functions, queue, *redirected_functions(device)):
            stack.enter_context(replaced(owner, name, value))
        yield


class ImmediateQueue(list[Any]):
    """Runs at once the calls that torch.cuda would keep until CUDA starts, which it never does.

    Megatron's random tracker sets its state through them; kept, they would pile up with every recomputed layer.
    """

    def append(self, item: tuple[Callable[[], None], Any]) -> None:
        item[0]()


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
