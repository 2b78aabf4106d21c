"""Which pickles ranks read: those of checkpoints and errors, and none that calls a function."""

from __future__ import annotations

import functools
import io
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.train.rank_messages import RankUnpickler, only_records_between_ranks

with megatron_imports():
    from megatron.core.dist_checkpointing import ShardedTensor

INDEX = MetadataIndex("weight", torch.Size([2, 3]), 1)
CHUNK = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
PROPERTIES = TensorProperties(dtype=torch.bfloat16)
ITEM = WriteItem(INDEX, WriteItemType.SHARD, tensor_data=TensorWriteData(CHUNK, PROPERTIES, torch.Size([4])))
STORAGE = {"weight": TensorStorageMetadata(PROPERTIES, torch.Size([4]), [CHUNK]), "state": BytesStorageMetadata()}


def read(content: bytes) -> Any:
    return RankUnpickler(io.BytesIO(content)).load()


@pytest.mark.parametrize(
    "message",
    [
        {"a": [1, 2.0, None, True, "b", b"c", {3}, frozenset([4]), (5, slice(6))]},
        SavePlan([ITEM], storage_data=None, planner_data={"weight": ("model", "weight")}),
        [WriteResult(INDEX, 17, _StorageInfo("__0_0.distcp", 0, 17))],
        Metadata(STORAGE, planner_data=None, storage_data={INDEX: _StorageInfo("__0_0.distcp", 0, 17)}),
        ShardedTensor.from_rank_offsets("weight", torch.zeros(4), (0, 1, 2), replica_id=0).without_data(),
        [torch.float16, torch.strided, torch.Size([1]), torch.device("cpu")],
    ],
    ids=["plain data", "plan", "results", "metadata", "sharded tensor", "torch's constants"],
)
def test_records_of_checkpoints_are_read(message: Any) -> None:
    assert read(pickle.dumps(message)) == message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_are_read(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    assert torch.equal(read(pickle.dumps({"state": tensor}))["state"], tensor)


@pytest.mark.parametrize(
    "error", [OSError(28, "full"), torch.OutOfMemoryError("memory"), ConfigError("setting"), KeyError("name")]
)
def test_errors_are_read_with_their_stacks(error: Exception) -> None:
    try:
        raise error
    except Exception as caught:
        wrapped = _wrap_exception(caught)
    failures = read(pickle.dumps(CheckpointException("write", {1: wrapped}))).failures
    assert (type(failures[1][0]), str(failures[1][0])) == (type(error), str(error))


class Calls:
    """What calls a function when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def calling(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls what a name leads to; names of protocol 4 may have dots."""
    texts = [text.encode() for text in (module, name, argument)]
    first, second, third = (b"\x8c" + bytes([len(text)]) + text for text in texts)
    return b"\x80\x04" + first + second + b"\x93" + third + b"\x85R."


@pytest.mark.parametrize("function", [os.mkdir, eval, exec, getattr, __import__, open, subprocess.Popen])
def test_functions_are_never_called(tmp_path: Path, function: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"names .*, which is no plain data"):
        read(pickle.dumps(Calls(function, str(tmp_path / "mark"))))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),  # dots lead out of a module
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("torch.distributed.checkpoint.utils", "cProfile.runctx"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),  # a class that is no record
        ("torch.distributed.checkpoint.metadata", "Path"),
        ("torch.serialization", "load"),
        ("torch.no_such_module", "Error"),
        ("mindspeed_cp.train.launch", "launch"),
    ],
)
def test_a_module_of_records_leads_nowhere_else(tmp_path: Path, module: str, name: str) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(pickle.UnpicklingError, match=r"a message of another rank names"):
        read(calling(module, name, str(mark)))
    assert not mark.exists()


def test_a_tensor_hides_no_call(tmp_path: Path) -> None:
    """torch's own reader of a tensor's storage unpickles whatever it is given."""
    mark, inner = tmp_path / "mark", io.BytesIO()
    torch.save(Calls(os.mkdir, str(mark)), inner)
    message = pickle.dumps(Calls(torch.storage._load_from_bytes, inner.getvalue()))
    with pytest.raises(pickle.UnpicklingError, match=r"(?i)weights.only"):
        read(message)
    assert not mark.exists()
    pickle.loads(message)
    assert mark.is_dir()


def test_a_torch_that_reads_messages_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_unpickler")
    with pytest.raises(NotImplementedError, match="in another way"), only_records_between_ranks():
        pass


def test_partial_calls_are_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"functools\.partial"):
        read(pickle.dumps(functools.partial(print, "x")))
