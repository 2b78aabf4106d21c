"""megatron_training_on_cpu: run Megatron's own training loop (megatron.training) on the CPU.

=============================================  ==========  =====================================================
what megatron.training does                    versions    replaced by
=============================================  ==========  =====================================================
wants CUDA                                     all         its own allow_no_cuda, which pretrain() does not pass on
asks torch.cuda what the device can do, and    all         one device of capability 8.0; figures of memory are 0
how much memory it has
compiles an index builder, with make           all         nothing: the wheels bring it compiled
compiles fused kernels, with nvcc              0.12-0.16   nothing: planned attention has its own
pins what data loaders give                    all         data stay as they are
warms up functions that torch.compile fuses    all         nothing, and torch.compile leaves functions as written
imports kernels of Triton                      0.16, 0.17  :func:`training_imports`
=============================================  ==========  =====================================================
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data._utils import pin_memory

from mindspeed_cp.megatron.patches.compat import megatron_compat, replaced
from mindspeed_cp.megatron.patches.device_shim import megatron_on_cpu

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


_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used")

#: Functions of Megatron that do nothing here: module and name; those that a version lacks are left out.
_LEFT_OUT = (
    ("megatron.core.datasets.utils", "compile_helpers"),
    ("megatron.training.initialize", "_warmup_jit_function"),
    ("megatron.legacy.fused_kernels", "load"),
)


@contextmanager
def megatron_training_on_cpu() -> Iterator[None]:
    """Run Megatron's training loop on the CPU inside this block, for tests and CI; all is undone on exit.

    Enters :func:`megatron_on_cpu` and :func:`megatron_compat`, imports megatron.training, and leaves out or answers
    what that asks of a GPU. Pass Megatron ``--distributed-backend gloo --use-cpu-initialization --transformer-impl
    local --no-gradient-accumulation-fusion --no-persist-layer-norm``.

    Raises:
        ImportError: there is no megatron.training.
    """
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    with ExitStack() as stack:
        for context in (training_imports(), megatron_on_cpu(), megatron_compat()):
            stack.enter_context(context)
        for name, value in _cuda_answers().items():
            stack.enter_context(replaced(torch.cuda, name, value))
        stack.enter_context(replaced(dynamo, "disable", True))
        stack.enter_context(replaced(pin_memory, "pin_memory", lambda data, *args: data))
        loop: Any = importlib.import_module("megatron.training.training")
        without_cuda = partial(loop.initialize_megatron, allow_no_cuda=True)
        stack.enter_context(replaced(loop, "initialize_megatron", without_cuda))
        for module_name, name in _LEFT_OUT:
            module = _module(module_name)
            if module is not None and hasattr(module, name):
                stack.enter_context(replaced(module, name, _nothing))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _cuda_answers() -> dict[str, Any]:
    """Return what torch.cuda says of the one device that there seems to be."""
    properties = SimpleNamespace(name="CPU", major=8, minor=0, total_memory=1, multi_processor_count=1)
    answers: dict[str, Any] = {name: lambda *args, **kwargs: 0 for name in _MEMORY}
    return {
        **answers,
        "device_count": lambda: 1,
        "get_device_capability": lambda *args: (8, 0),
        "get_device_properties": lambda *args: properties,
        "get_device_name": lambda *args: properties.name,
        "memory_stats": lambda *args: defaultdict(int),
        "mem_get_info": lambda *args: (0, 1),
        "reset_peak_memory_stats": _nothing,
    }
