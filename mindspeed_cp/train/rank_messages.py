"""Messages between ranks that are Python objects: the plans of checkpoints, and errors; as JSON, never as pickles.

torch and Megatron-core exchange such objects when a checkpoint is written or loaded, and pickle them. Gloo, which
carries them, asks nobody for a password, and a pickle can have any function called. So ranks write and read plain data,
tensors, errors, and the records (dataclasses and enums) of the two checkpoint packages. To read a message calls no
constructor of a class that it names and imports nothing.

A value is JSON's own (null, true, number, string), or a list of a tag and what makes up the value::

    ["list", 1, 2]   ["dict", key, value, key, value]   ["bytes", "base64"]   ["dtype", "float32"]
    ["record", "torch.distributed.checkpoint.metadata", "MetadataIndex", "weight", ["size", 0], 1]
    ["error", "RuntimeError", "text"]
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import CheckpointException

from mindspeed_cp.megatron.patches.swap import replaced
from mindspeed_cp.plan_sharing.error_messages import decode_error, decode_os_error, encode_error

_RECORDS = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.dist_checkpointing.")
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_TAGS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}


class MessageWriter:
    """Writes messages to a file, in place of pickle.Pickler."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def dump(self, message: Any) -> None:
        """Write a message; raise TypeError for what ranks do not send."""
        self._file.write(json.dumps(_encode(message), separators=(",", ":")).encode())


class MessageReader:
    """Reads messages from a file, in place of pickle.Unpickler."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def load(self) -> Any:
        """Return the message; raise ValueError for what no rank writes."""
        try:
            return _decode(json.loads(self._file.read()))
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
            text = " ".join(str(error).split())[:200]
            raise ValueError(f"a message of another rank is not one that ranks write ({text})") from None


@contextmanager
def without_pickles_between_ranks() -> Iterator[None]:
    """Let torch's collectives of objects use `MessageWriter` and `MessageReader` within the block."""
    if not (hasattr(distributed_c10d, "_pickler") and hasattr(distributed_c10d, "_unpickler")):
        raise NotImplementedError(f"torch {torch.__version__} reads the messages of ranks in another way")
    with (
        replaced(distributed_c10d, "_pickler", MessageWriter),
        replaced(distributed_c10d, "_unpickler", MessageReader),
    ):
        yield


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in _TAGS:
        return [_TAGS[kind], *map(_encode, value)]
    if isinstance(value, dict):
        return ["dict", *(_encode(part) for item in value.items() for part in item)]
    if kind is bytes:
        return ["bytes", b64encode(value).decode()]
    if kind is slice:
        return ["slice", *map(_encode, (value.start, value.stop, value.step))]
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["tensor", _name(value.dtype), list(value.shape), b64encode(content).decode()]
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return [kind.__name__, _name(value)]
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, traceback.StackSummary):
        return ["stack"]
    if isinstance(value, BaseException):
        return _encode_error(value)
    if _is_record(kind):
        names = _field_names(kind)
        for name in vars(value):
            if name not in names:
                raise TypeError(f"ranks do not send the attribute {name} of a {kind.__name__}, which is no field of it")
        return ["record", kind.__module__, kind.__name__, *(_encode(getattr(value, name)) for name in names)]
    if _is_enum(kind):
        return ["enum", kind.__module__, kind.__name__, value.name]
    raise TypeError(f"ranks do not send values of type {kind.__module__}.{kind.__name__}")


def _encode_error(error: BaseException) -> list[Any]:
    if isinstance(error, CheckpointException):
        return ["failures", str(error.args[0]), _encode(error.failures)]  # its str() holds lines of files
    return encode_error(error)


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("a mapping without a tag")
        return value
    tag, *parts = value
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([_decode(part) for part in parts])
    return _DECODERS[tag](*parts)


def _decode_dict(*parts: Any) -> dict[Any, Any]:
    values = [_decode(part) for part in parts]
    return dict(zip(values[::2], values[1::2], strict=True))


def _decode_tensor(dtype: str, shape: list[int], content: str) -> torch.Tensor:
    buffer = bytearray(b64decode(content, validate=True))
    flat = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
    return flat.view(_constant(torch.dtype, dtype)).reshape(shape)


def _decode_failures(text: str, failures: Any) -> CheckpointException:
    return CheckpointException(text, _decode(failures))


def _decode_record(module: str, name: str, *values: Any) -> Any:
    kind = _class(module, name)
    if not _is_record(kind):
        raise ValueError(f"{module}.{name} is no record of checkpoints")
    record = object.__new__(kind)
    vars(record).update(zip(_field_names(kind), map(_decode, values), strict=True))
    return record


_fields: dict[type, tuple[str, ...]] = {}


def _field_names(kind: Any) -> tuple[str, ...]:
    if kind not in _fields:
        _fields[kind] = tuple(field.name for field in dataclasses.fields(kind))
    return _fields[kind]


def _decode_enum(module: str, name: str, member: str) -> enum.Enum:
    kind = _class(module, name)
    if not _is_enum(kind):
        raise ValueError(f"{module}.{name} is no enum of checkpoints")
    return kind.__members__[member]


def _class(module: str, name: str) -> Any:
    """Return the class that an imported module defines, not one that it imports."""
    kind = vars(sys.modules[module]).get(name)
    if not isinstance(kind, type) or (kind.__module__, kind.__name__) != (module, name):
        raise ValueError(f"{module}.{name} is no class of that module")
    return kind


def _constant(kind: type, name: str) -> Any:
    value = vars(torch).get(name)
    if not isinstance(value, kind):
        raise ValueError(f"torch.{name} is no {kind.__name__}")
    return value


_DECODERS: dict[str, Callable[..., Any]] = {
    "dict": _decode_dict,
    "bytes": lambda text: b64decode(text, validate=True),
    "slice": lambda *parts: slice(*map(_decode, parts)),
    "tensor": _decode_tensor,
    "dtype": lambda name: _constant(torch.dtype, name),
    "layout": lambda name: _constant(torch.layout, name),
    "memory_format": lambda name: _constant(torch.memory_format, name),
    "path": Path,
    "stack": lambda: traceback.StackSummary(),  # empty: frames would be filled with lines of any file that they name
    "failures": _decode_failures,
    "error": decode_error,
    "os error": decode_os_error,
    "record": _decode_record,
    "enum": _decode_enum,
}


def _name(constant: torch.dtype | torch.layout | torch.memory_format) -> str:
    return str(constant).removeprefix("torch.")


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__.startswith(_RECORDS)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum) and f"{kind.__module__}.".startswith(_RECORDS)
