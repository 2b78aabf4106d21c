"""Choice between the Triton kernels and torch, and what every launch needs."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError

IMPLEMENTATIONS = ("triton", "torch")

#: Maximum number of programs of a launch; each program strides over the blocks. triton-ascend refuses grids of 65,536
#: and more programs (product of all dimensions) unless TRITON_ALL_BLOCKS_PARALLEL is set. No GPU runs as many at once.
MAX_PROGRAMS = 65_535


@cache
def has_triton() -> bool:
    """True if the package triton is installed (triton-ascend installs under the same name)."""
    return importlib.util.find_spec("triton") is not None


def uses_interpreter() -> bool:
    """True if kernels run in Triton's interpreter, on CPU tensors. Set the variable before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def implementation_for(x: Tensor, implementation: str | None = None) -> str:
    """Return the implementation, "triton" or "torch", for tensors on the device of ``x``.

    Args:
        x: any of the tensors.
        implementation: one of IMPLEMENTATIONS; None: "triton" on a device, "torch" on a CPU.

    Raises:
        ConfigError: unknown implementation, or it cannot run on that device. A device without triton does not fall back
            to torch by itself, because torch is many times slower.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ConfigError(f"implementation is {implementation!r}; valid: {', '.join(IMPLEMENTATIONS)}, or None")
    on_cpu = x.device.type == "cpu"
    chosen = implementation or ("torch" if on_cpu else "triton")
    if chosen == "triton" and not has_triton():
        raise ConfigError(
            f"implementation is 'triton' for tensors on {x.device.type}, but the package triton (on NPUs: "
            "triton-ascend) is not installed; install it, or use implementation='torch'"
        )
    if chosen == "triton" and on_cpu and not uses_interpreter():
        raise ConfigError(
            "implementation is 'triton' for tensors on cpu, where only Triton's interpreter runs kernels: set "
            "TRITON_INTERPRET=1 before triton is imported, or use implementation='torch'"
        )
    return chosen


def device_guard(x: Tensor) -> AbstractContextManager[Any]:
    """Make the device of ``x`` current: Triton launches on the current device, wherever the tensors are."""
    if x.device.type in ("cpu", "meta"):
        return nullcontext()
    guard: AbstractContextManager[Any] = torch.get_device_module(x.device).device(x.device)
    return guard


def launch_grid(blocks: int) -> tuple[int]:
    """Return the grid for a number of blocks: one program for each, at most MAX_PROGRAMS."""
    return (min(blocks, MAX_PROGRAMS),)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def check_memory(**tensors: Tensor | None) -> None:
    """Raise ConfigError unless tensors are contiguous and on one device: kernels read whatever memory they are given.
    Shapes and types are those of the callers' contracts."""
    device = next(x.device for x in tensors.values() if x is not None)
    for name, x in tensors.items():
        if x is not None and (x.device != device or not x.is_contiguous()):
            raise ConfigError(
                f"{name} is of strides {list(x.stride())} on {x.device}; valid: contiguous, on {device}, where the "
                "others are"
            )
