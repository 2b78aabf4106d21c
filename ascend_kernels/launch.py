"""Which implementation computes: the Triton kernel or torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError

IMPLEMENTATIONS = ("triton", "torch")

#: Programs of a launch at most; each takes every so-manieth block until none is left. triton-ascend refuses 65,536 and
#: more, all dimensions of the grid multiplied, unless TRITON_ALL_BLOCKS_PARALLEL is set. No GPU runs as many at a time.
PROGRAMS = 65_535


@cache
def has_triton() -> bool:
    """Whether the package triton, or triton-ascend under its name, is installed."""
    return importlib.util.find_spec("triton") is not None


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors; to be set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def implementation_for(x: Tensor, implementation: str | None = None) -> str:
    """ "triton" or "torch", for tensors like x.

    Args:
        x: any of the tensors.
        implementation: of IMPLEMENTATIONS; None: "triton" on a device, "torch" on a CPU.

    Raises:
        ConfigError: no such implementation, or it cannot run here. A device without triton is not served by torch
            unless that is asked for: it would be many times slower.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ConfigError(f"implementation is {implementation!r}; valid: {', '.join(IMPLEMENTATIONS)}, or None")
    on_cpu = x.device.type == "cpu"
    chosen = implementation or ("torch" if on_cpu else "triton")
    if chosen == "triton" and not has_triton():
        raise ConfigError(
            f"implementation is 'triton' for tensors on {x.device.type}, but the package triton (on NPUs: "
            "triton-ascend) is not installed; install it, or give implementation='torch'"
        )
    if chosen == "triton" and on_cpu and not interprets():
        raise ConfigError(
            "implementation is 'triton' for tensors on cpu, where only Triton's interpreter runs kernels: set "
            "TRITON_INTERPRET=1 before triton is imported, or give implementation='torch'"
        )
    return chosen


def current(x: Tensor) -> AbstractContextManager[Any]:
    """The device of x is the current one inside: Triton launches there, whatever the tensors say."""
    if x.device.type in ("cpu", "meta"):
        return nullcontext()
    found: AbstractContextManager[Any] = torch.get_device_module(x.device).device(x.device)
    return found


def grid(blocks: int) -> tuple[int]:
    """The programs that do so many blocks."""
    return (min(blocks, PROGRAMS),)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n; 0 of 0."""
    return 1 << (n - 1).bit_length() if n else 0


def need(holds: bool, what: str, found: object, valid: str) -> None:
    """Raise ConfigError unless it holds."""
    if not holds:
        raise ConfigError(f"{what} is {found}; valid: {valid}")


def check_tensor(
    name: str,
    x: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    like: Tensor,
    within: bool = False,
) -> None:
    """Raise ConfigError unless x is what kernels read: they take any memory for what it should be.

    Args:
        name: of the argument.
        x: its value.
        shape: that it must have.
        dtype: that it must have; None: any floating type.
        like: on whose device it must lie.
        within: contiguous within each part, x[0], x[1] and so on, will do.
    """
    right = x.is_floating_point() if dtype is None else x.dtype == dtype
    kind = "a floating type" if dtype is None else str(dtype)
    need(right, f"{name}'s type", x.dtype, kind)
    need(list(x.shape) == list(shape), f"{name}'s shape", list(x.shape), f"{list(shape)}")
    whole = x[:1].is_contiguous() if within else x.is_contiguous()
    need(whole, name, f"of strides {list(x.stride())}", "contiguous within a part" if within else "contiguous")
    need(x.device == like.device, name, f"on {x.device}", f"on {like.device}, where the others are")
