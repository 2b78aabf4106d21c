"""Kernels of torch's operators, called and replaced from Python, on every torch that the project runs on.

Before torch 2.9 there is no ``torch.library.get_kernel``: a kernel is called through its operator there, which finds it
anew in each call.  That does for all kernels but those that are replaced themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

HAS_KERNELS = hasattr(torch.library, "get_kernel")
_OVERRIDES = (
    {"allow_override": True} if "allow_override" in inspect.signature(torch.library.Library.impl).parameters else {}
)


def kernel(operator: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """What a key has for an operator, as a function of the keys of the call and its arguments."""
    if HAS_KERNELS:
        return torch.library.get_kernel(operator, key).call_boxed
    dispatch_key = torch._C._parse_dispatch_key(key)

    def call(keyset: Any, *arguments: Any, **options: Any) -> Any:
        return operator._op_dk(dispatch_key, *arguments, **options)

    return call


def replace(library: torch.library.Library, name: str, function: Callable[..., Any], key: str, **options: Any) -> None:
    """Put a function in place of the kernel that an operator of aten has for a key."""
    library.impl(name.removeprefix("aten::"), function, key, **_OVERRIDES, **options)
