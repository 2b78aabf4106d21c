"""Counts from outside every tensor that is made while the engine runs."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mindspeed_cp
from mindspeed_cp.ops.attention.accumulators import OutputAccumulator

PACKAGE = Path(mindspeed_cp.__file__).parent
BUFFERS = ("kv", "gradients", "redistributed", "staging")


class Meter(TorchDispatchMode):
    """Every piece of memory that a torch operation makes, by who asked for it.

    "kv", "gradients", "redistributed" and "staging" are the communication buffers of `peak_bytes`; "gradients" are those of queries
    too; "kernel" is what operators make, also where it is kept as it is; "engine" is the accumulators of outputs, and
    what results are rounded to. What was there before is not counted.

    Attributes:
        peak: for each kind the most bytes that were alive at once; "total" is of all buffers together.
        largest: for each kind the largest piece, in elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = dict.fromkeys((*BUFFERS, "kernel", "engine", "total"), 0)
        self.largest = dict.fromkeys((*BUFFERS, "kernel", "engine"), 0)
        self._known: dict[int, tuple[StorageWeakRef, str, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                self._meet(x, "before")
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._meet(x, None)
        return out

    def restart(self) -> None:
        """Peaks begin again with what is alive now."""
        self.peak = self._alive()

    def kind_of(self, x: torch.Tensor) -> str:
        """The kind of memory of a tensor that was met."""
        return self._known[x.untyped_storage()._cdata][1]

    def _alive(self) -> dict[str, int]:
        """Forget what is gone, and return the bytes of what is left, by kind."""
        self._known = {number: entry for number, entry in self._known.items() if not entry[0].expired()}
        alive = dict.fromkeys(self.peak, 0)
        for _, kind, size in self._known.values():
            if kind != "before":
                alive[kind] += size
                alive["total"] += size * (kind in BUFFERS)
        return alive

    def _meet(self, x: torch.Tensor, kind: str | None) -> None:
        """Note memory that is not known yet. A weak reference keeps its number from being used again."""
        storage = x.untyped_storage()
        if storage._cdata in self._known:
            return
        kind = purpose_of_memory() if kind is None else kind
        self._known[storage._cdata] = StorageWeakRef(storage), kind, storage.nbytes()
        if kind == "before":
            return
        self.largest[kind] = max(self.largest[kind], storage.nbytes() // x.element_size())
        self.peak = {name: max(self.peak[name], size) for name, size in self._alive().items()}


#: The kind of memory by the function that makes it; of others of the package it is staging.
KINDS = {
    "__init__": "kv",
    "start_redistributions": "redistributed",
    "join_rows": "redistributed",
}


def purpose_of_memory() -> str:
    """The kind of what is being made, by the innermost function of the package."""
    frame, takes_rows = sys._getframe(), False
    while frame is not None:
        folder, file = place_in_package(frame.f_code.co_filename)
        name = frame.f_code.co_name
        if file == "rows.py":
            takes_rows = True
        elif file == "accumulators.py":
            if isinstance(frame.f_locals.get("self"), OutputAccumulator):
                return "engine"
            if name == "result":
                return "gradients" if frame.f_locals["dtype"] == torch.float32 else "engine"
            if name == "fp32":
                return "gradients"
        elif file and name not in ("staging_buffer", "<genexpr>"):
            if folder in ("ops", "ascend_kernels"):
                return "kernel"
            if file == "attention.py":
                return "redistributed" if takes_rows else "engine"
            return KINDS.get(name, "staging")
        frame = frame.f_back  # type: ignore[assignment]
    return "engine"


@cache
def place_in_package(path: str) -> tuple[str, str]:
    """The folder of the package and the name of a file; empty for files outside."""
    file = Path(path)
    return (file.relative_to(PACKAGE).parts[0], file.name) if PACKAGE in file.parents else ("", "")
