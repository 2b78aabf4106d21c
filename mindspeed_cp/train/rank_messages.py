"""Messages between ranks that are Python objects: the plans of checkpoints, and errors.

torch and Megatron-core exchange them as pickles when a checkpoint is written or loaded. Gloo, which carries them, asks
nobody for a password, and a pickle can have any function called. So ranks read only plain data, the records of which
these messages consist, and errors.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d

from mindspeed_cp.megatron.patches.swap import replaced

#: What makes values of values, and does nothing else.
_CONSTRUCTORS = {
    ("builtins", "complex"),
    ("builtins", "frozenset"),
    ("builtins", "object"),
    ("builtins", "set"),
    ("builtins", "slice"),
    ("collections", "OrderedDict"),
    ("copyreg", "_reconstructor"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.serialization", "_get_layout"),
    ("traceback", "FrameSummary"),
    ("traceback", "StackSummary"),
}
_RECORDS = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.dist_checkpointing.")
_ERRORS = ("builtins", "torch", "megatron.", "mindspeed_cp.")


class RankUnpickler(pickle.Unpickler):
    """Reads a message of another rank; raises UnpicklingError for one that names anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a message names; nothing is imported for it, and no attribute of a class is looked up."""
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        named = getattr(sys.modules.get(module), name, None)
        if (module, name) in _CONSTRUCTORS or isinstance(named, torch.dtype) or _is_record_or_error(named, module):
            return named
        raise pickle.UnpicklingError(
            f"a message of another rank names {module}.{name}, which is no plain data, record of checkpoints or error"
        )


def _is_record_or_error(named: Any, module: str) -> bool:
    if not isinstance(named, type) or named.__module__ != module:  # else what a module imports could be named
        return False
    if issubclass(named, BaseException):
        return module.startswith(_ERRORS)
    is_named_tuple = issubclass(named, tuple) and hasattr(named, "_fields")
    is_record = dataclasses.is_dataclass(named) or is_named_tuple or issubclass(named, enum.Enum)
    return is_record and module.startswith(_RECORDS)


def _load_storage(content: bytes) -> Any:
    """Return the storage of a tensor; torch's own function of that name would unpickle anything."""
    return torch.load(io.BytesIO(content), weights_only=True)


@contextmanager
def only_records_between_ranks() -> Iterator[None]:
    """Read messages of other ranks by `RankUnpickler` within the block."""
    if not hasattr(distributed_c10d, "_unpickler"):
        raise NotImplementedError(f"torch {torch.__version__} reads the messages of ranks in another way")
    with replaced(distributed_c10d, "_unpickler", RankUnpickler):
        yield
