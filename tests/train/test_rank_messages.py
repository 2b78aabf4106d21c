"""What ranks send each other comes back equal, and nothing that they read calls, constructs or imports anything."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistBackendError
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.train.rank_messages import MessageReader, MessageWriter, without_pickles_between_ranks
from mindspeed_cp.train.stop_request import Stopped

with megatron_imports():
    from megatron.core.dist_checkpointing import ShardedTensor

INDEX = MetadataIndex("weight", torch.Size([2, 3]), 1)
CHUNK = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
PROPERTIES = TensorProperties(dtype=torch.bfloat16, layout=torch.strided, memory_format=torch.preserve_format)
ITEM = WriteItem(INDEX, WriteItemType.SHARD, tensor_data=TensorWriteData(CHUNK, PROPERTIES, torch.Size([4])))
STORAGE = {"weight": TensorStorageMetadata(PROPERTIES, torch.Size([4]), [CHUNK]), "state": BytesStorageMetadata()}
PLACES = {INDEX: _StorageInfo("__0_0.distcp", 0, 17)}


def sent(message: Any) -> Any:
    """What another rank reads of a message."""
    file = io.BytesIO()
    MessageWriter(file).dump(message)
    return read(file.getvalue())


def read(content: bytes) -> Any:
    return MessageReader(io.BytesIO(content)).load()


def nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.one_of(st.text(), st.integers(), st.tuples(st.text(), st.integers()))
    return st.lists(values) | st.tuples(values, values) | st.dictionaries(keys, values)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()


@given(st.recursive(PLAIN, nested))
def test_plain_data_come_back_with_their_types(message: Any) -> None:
    answer = sent(message)
    assert answer == message
    assert repr(answer) == repr(message)  # True is not 1, and a tuple no list


@pytest.mark.parametrize(
    "message",
    [
        [{3, 4}, frozenset([5]), slice(6), slice(None, 7, 2), Path("a/b")],
        SavePlan([ITEM], storage_data=_StoragePrefix("__0_"), planner_data={"weight": ("model", "weight")}),
        [WriteResult(INDEX, 17, PLACES[INDEX])],
        Metadata(STORAGE, planner_data=None, storage_data=PLACES, storage_meta=StorageMeta(checkpoint_id=Path("a"))),
        ShardedTensor.from_rank_offsets("weight", torch.zeros(4), (0, 1, 2), replica_id=0).without_data(),
        [torch.float16, torch.strided, torch.channels_last, torch.Size([1, 2]), torch.Size([])],
    ],
    ids=["Python's values", "plan", "results", "metadata", "sharded tensor", "torch's constants"],
)
def test_records_of_checkpoints_come_back(message: Any) -> None:
    answer = sent(message)
    assert answer == message
    assert type(answer) is type(message)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(2, 3), (0, 2), ()])
def test_tensors_come_back_bit_equal(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6)[: max(1, shape[0] * 3) if shape else 1].to(dtype)
    tensor = tensor.reshape(shape) if tensor.numel() == torch.Size(shape).numel() else torch.empty(shape, dtype=dtype)
    answer = sent({"state": tensor.t() if len(shape) == 2 else tensor})["state"]
    assert answer.dtype == dtype
    assert torch.equal(answer, tensor.t() if len(shape) == 2 else tensor)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError(28, "No space left on device", Path("a/b")), OSError, "[Errno 28] No space left on device: 'a/b'"),
        (torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError, "out of memory"),
        (DistBackendError("connection closed"), torch.distributed.DistError, "connection closed"),
        (ConfigError("train.lr = 0"), ConfigError, "train.lr = 0"),
        (KeyError("name"), KeyError, "'name'"),
        (pickle.UnpicklingError("cut short"), RuntimeError, "UnpicklingError: cut short"),
        (Stopped("SIGTERM"), RuntimeError, "Stopped: "),  # only a rank's own end may look like a stop
        (SystemExit(0), RuntimeError, "SystemExit: 0"),
    ],
)
def test_errors_arrive_as_errors_of_a_known_class(error: BaseException, kind: type, text: str) -> None:
    try:
        raise error
    except BaseException as caught:
        wrapped = _wrap_exception(caught)
    answer = sent(CheckpointException("write", {1: wrapped}))
    assert type(answer) is CheckpointException
    arrived, stack = answer.failures[1]
    assert type(arrived) is kind
    assert str(arrived).startswith(text)
    assert isinstance(stack, traceback.StackSummary)
    assert "raise error" in "".join(wrapped[1].format())  # a line of this file
    assert "raise error" not in str(answer)


class Mode(enum.Enum):
    A = 1


@pytest.mark.parametrize("message", [object(), print, Mode.A, {"a": [lambda: 0]}, os, int, 1j])
def test_what_ranks_do_not_send_is_refused_by_the_sender(message: Any) -> None:
    with pytest.raises(TypeError, match=r"ranks do not send values of type"):
        sent(message)


def test_a_field_that_a_record_does_not_declare_is_refused_by_the_sender() -> None:
    prefix = _StoragePrefix("__0_")
    prefix.more = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="the attribute more of a _StoragePrefix"):
        sent(prefix)


class Calls:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.folder),)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a message of another rank is not one that ranks write"):
        read(pickle.dumps(Calls(tmp_path / "mark")))
    assert not (tmp_path / "mark").exists()


FILESYSTEM = "torch.distributed.checkpoint.filesystem"


@pytest.mark.parametrize(
    "message",
    [
        ["record", "os", "mkdir"],
        ["record", "subprocess", "Popen", ["args", "x"]],
        ["record", FILESYSTEM, "os.mkdir"],
        ["record", FILESYSTEM, "FileSystemReader", ["path", "x"]],  # a class that is no record
        ["record", FILESYSTEM, "Metadata"],  # a record of another module
        ["record", FILESYSTEM, "_StoragePrefix"],
        ["record", FILESYSTEM, "_StoragePrefix", "a", "b"],
        ["record", "mindspeed_cp.train.progress", "Progress", ["step", 1]],
        ["record", "torch.distributed.checkpoint.no_such_module", "Record"],
        ["enum", "signal", "Signals", "SIGKILL"],
        ["enum", "torch.distributed.checkpoint.planner", "WriteItemType", "__init__"],
        ["error", "SystemExit", "0"],
        ["error", "Stopped", "x"],
        ["stack", [["/etc/passwd", 1, "f", None]]],
        ["dtype", "load"],
        ["layout", "float32"],
        ["tensor", "float32", [1 << 60], ""],
        ["tensor", "float32", [2], "AAAA"],
        ["bytes", "!"],
        ["dict", 1],
        ["dict", ["list"], 1],
        ["size", "a"],
        ["no such tag", 1],
        [["list"], 1],
        [],
        {"a": 1},
    ],
    ids=str,
)
def test_a_message_that_no_rank_writes_is_refused(message: Any) -> None:
    modules = set(sys.modules)
    with pytest.raises(ValueError, match=r"a message of another rank is not one that ranks write"):
        read(json.dumps(message).encode())
    assert set(sys.modules) == modules


def test_hostile_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not one that ranks write"):
        read(b'["list",' * 100_000 + b"1" + b"]" * 100_000)


def test_a_torch_that_exchanges_objects_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_unpickler")
    with pytest.raises(NotImplementedError, match="in another way"), without_pickles_between_ranks():
        pass
