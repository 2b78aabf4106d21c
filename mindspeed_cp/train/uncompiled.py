"""uncompiled_megatron: import Megatron-core without torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uncompiled_megatron() -> Iterator[None]:
    """Leave the functions that Megatron-core would fuse as they are written, if it is imported in this block.

    Megatron-core passes some thirty small functions to torch.compile while it is imported, which imports the whole
    compiler, a third of what a rank needs to start. The devices of `mindspeed-cp train` gain nothing from it: a step
    on the CPU would wait for a C++ compiler, and torch_npu brings none. Megatron-core's own `disable_jit_fuser` comes
    too late, since its package has used the decorator by then.
    """
    import torch

    compile_before = torch.compile
    torch.compile = _as_written  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_before


def _as_written(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Take the place of torch.compile, as a function or as a decorator with options."""
    return _as_written if function is None else function
