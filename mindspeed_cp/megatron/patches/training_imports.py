"""Import megatron.training where no Triton is: 0.16 and 0.17 import kernels of Triton that the CPU never runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

#: Modules of Megatron-core that import Triton, and nothing but an option that planned attention refuses calls.
_TRITON_MODULES = ("megatron.core.transformer.custom_layers.batch_invariant_kernels",)


class _Kernels(ModuleType):
    """A module whose every name is a function that says what is missing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"{self.__name__}.{name} needs triton, which is not installed")

        return missing


@contextmanager
def training_imports() -> Iterator[None]:
    """Let ``import megatron.training`` succeed without Triton inside this block.

    Modules imported meanwhile keep the stand-ins, whose functions raise RuntimeError; the entries of sys.modules are
    removed on exit. Does nothing where Triton is installed.
    """
    present = importlib.util.find_spec("triton") is not None
    added = [] if present else [name for name in _TRITON_MODULES if name not in sys.modules]
    sys.modules.update({name: _Kernels(name) for name in added})
    try:
        yield
    finally:
        for name in added:
            if isinstance(sys.modules.get(name), _Kernels):
                del sys.modules[name]
