"""Functions and methods of torch that take a device, with CUDA devices among their arguments replaced.

A TorchFunctionMode would do the same for every torch function there is, and runs Python around every call of one. These
replacements run only where a tensor is made or moved, or asked for its type; operators are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._device import _device_constructors

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
