"""CudaMeans: what is asked of CUDA happens on another device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaMeans(TorchFunctionMode):
    """Replaces CUDA devices among the arguments of torch functions. It acts on the entering thread only.

    Args:
        device: that is meant instead.
    """

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


class AtOnce(list[Any]):
    """torch.cuda's queue of calls that wait for CUDA to start, which it never does here: Megatron's random tracker sets
    its state through it. Such a call runs at once; kept, it would pile up with every recomputed layer."""

    def append(self, item: tuple[Callable[[], None], Any]) -> None:
        item[0]()


def _is_cuda(x: object) -> bool:
    if isinstance(x, str):
        return x == "cuda" or x.startswith("cuda:")
    return isinstance(x, torch.device) and x.type == "cuda"
