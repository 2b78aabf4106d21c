"""Which implementation computes: the Triton kernel or torch."""

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
    if x.device.type == "cpu":
        return nullcontext()
    found: AbstractContextManager[Any] = torch.get_device_module(x.device).device(x.device)
    return found


def power_of_two(n: int) -> int:
    """The least power of two that is not below n; 0 of 0."""
    return 1 << (n - 1).bit_length() if n else 0


def need(holds: bool, what: str, found: object, valid: str) -> None:
    """Raise ConfigError unless it holds."""
    if not holds:
        raise ConfigError(f"{what} is {found}; valid: {valid}")
