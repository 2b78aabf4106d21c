"""State on disk: torch's distributed checkpoints, in a hidden folder that is renamed when it is complete.

    checkpoints/iter_0000050/   shard-0000N-model-...safetensors   tensors of one rank each
                                manifest.json                      the rest, with the SHA-256 of every file and its own
    checkpoints/latest          the name of the newest one, for people and scripts; nothing here reads it

A checkpoint exists as a whole or not at all: shards are written and made durable, their digests are taken, and the
folder is renamed. A run goes on from the newest one; one of which a file does not have its digest is passed over for
the one before. Tensors are named and placed as in the whole model, so that any number of ranks can load them. Nothing
is unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.train.checks import HISTORY, check_same_run, identity
from mindspeed_cp.train.failures import is_lost_rank_error, is_out_of_memory
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.run_files import RunFiles, disk_error, error_text, write_text
from mindspeed_cp.train.step import StepResult
from mindspeed_cp.train.world import World

with megatron_imports():
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import (
        dict_list_map_inplace,
        extract_matching_values,
        nested_values,
    )
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
        apply_factories,
        apply_factory_merges,
    )

MANIFEST = "manifest.json"


class DamagedCheckpointError(ConfigError):
    """A checkpoint is not whole; an older one may be."""


@dataclass(frozen=True)
class Progress:
    """State of a run after a step, apart from tensors.

    Attributes:
        step: number of finished optimizer steps.
        tokens: number of tokens trained on so far, over all ranks.
        seconds: time spent in steps so far.
        data: state of the data stream.
        losses: of the newest steps that were not skipped, which spikes are measured against.
        skipped_steps: steps whose update was left out.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    data: dict[str, Any] | None = None
    losses: tuple[float, ...] = ()
    skipped_steps: int = 0

    def after(self, result: StepResult, seconds: float) -> Progress:
        """Return the state after one more step, which took so many seconds."""
        is_skipped = result.problem is not None
        return Progress(
            step=self.step + 1,
            tokens=self.tokens + result.figures["tokens"],
            seconds=self.seconds + seconds,
            data=result.data,
            losses=self.losses if is_skipped else (*self.losses, result.loss)[-HISTORY:],
            skipped_steps=self.skipped_steps + is_skipped,
        )


_RECORD_KEYS = {*(field.name for field in fields(Progress)), "identity", "files"}


class Shard:
    """A part of a tensor of the whole model, as torch.distributed.checkpoint saves and loads it.

    Args:
        tensor: the part, on this rank.
        offsets: where it begins in the whole tensor.
        size: shape of the whole tensor.
    """

    def __init__(self, tensor: Tensor, offsets: tuple[int, ...], size: tuple[int, ...]) -> None:
        self.tensor, self._offsets, self._size = tensor.detach(), torch.Size(offsets), torch.Size(size)

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self._size

    def __create_write_items__(self, name: str, value: object) -> list[WriteItem]:
        data = TensorWriteData(
            chunk=self.__create_chunk_list__()[0],
            properties=TensorProperties.create_from_tensor(self.tensor),
            size=self._size,
        )
        return [WriteItem(index=MetadataIndex(name, self._offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=self._offsets, sizes=self.tensor.size())]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].tensor


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state as it is: torch's own planner puts tensors in the place of values that it does not know."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def named_shards(state: dict[str, Any]) -> dict[str, Shard]:
    """Return the tensors of a state of Megatron, after apply_factories, by names that are unique on a rank.

    Megatron gives one name to a weight of all layers or experts, numbered by leading dimensions, and to the two halves
    of a gated MLP; a safetensors file holds one part of each name. So these numbers become parts of the name.
    """
    parts: dict[str, list[ShardedTensor]] = defaultdict(list)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            numbers = value.global_offset[: value.prepend_axis_num]
            parts[".".join(map(str, (value.key, *numbers)))].append(value)
    shards = {}
    for name, tensors in parts.items():
        count = len(tensors)
        for number, value in enumerate(sorted(tensors, key=lambda x: x.global_offset)):
            if value.data is None:
                value.init_data("cpu")
            first = value.prepend_axis_num
            offsets, size = list(value.global_offset[first:]), list(value.global_shape[first:])
            if count > 1:  # rank r of n has rows r/n to (r+1)/n of each half
                axis = next(axis for axis, n in enumerate(size) if value.local_shape[axis] < n)
                size[axis] //= count
                offsets[axis] -= number * size[axis]
                if not 0 <= offsets[axis] <= size[axis] - value.local_shape[axis]:
                    raise NotImplementedError(f"{name}: parts of a rank are not equal parts of the whole tensor")
            shards[name if count == 1 else f"{name}.part{number}"] = Shard(value.data, tuple(offsets), tuple(size))
    return shards


def check_storage() -> None:
    """Raise ConfigError if torch or an absent package cannot write checkpoints."""
    if not hasattr(dcp, "HuggingFaceStorageWriter") or find_spec("safetensors") is None:
        raise ConfigError(
            f"torch {torch.__version__}: checkpoints of `mindspeed-cp train` need torch 2.9 or later and the package "
            "safetensors; install them"
        )


def sharded_state(training: TrainingModel, *, is_loading: bool) -> dict[str, Any]:
    """Return Megatron's state of model and optimizer as sharded tensors."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }
    model = {"model": training.model.sharded_state_dict(metadata=metadata)}
    optimizer = training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {**model, "optimizer": optimizer}


def _adam_states(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the states of torch's Adam, one for each weight; a weight that has none gets one of zeros, to load into."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for weight in (weight for group in part.optimizer.param_groups for weight in group["params"]):
            state = part.optimizer.state[weight]
            if not state:  # Megatron drops the counter of an optimizer at 0
                zeros = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                state.update(step=torch.tensor(1.0), **zeros)
            yield state


def save_checkpoint(files: RunFiles, training: TrainingModel, progress: Progress) -> Path:
    """Save a checkpoint after a step, and return its folder; every rank calls it.

    Raises:
        OSError: it cannot be written; the newest checkpoint before it stays the newest.
    """
    world, settings = training.world, training.world.settings
    state = sharded_state(training, is_loading=False)
    apply_factories(state)
    record = {**asdict(progress), "identity": identity(settings)}
    final = files.checkpoint(progress.step)
    partial = final.with_name(f".saving-{final.name}")

    def begin() -> None:
        for leftover in files.checkpoints.glob(".saving-*"):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)

    def write() -> None:
        writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
        dcp.save(named_shards(state), storage_writer=writer, planner=_SavePlanner())

    def name_it() -> None:
        record["files"] = {name: digest for of_rank in digests for name, digest in of_rank.items()}
        write_text(partial / MANIFEST, _manifest_text(record))
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        write_text(files.latest, final.name + "\n")  # makes both names durable
        _prune(files, settings.checkpoint.keep, progress.step)

    _on_all_ranks(begin, files, world, only_first=True)
    _on_all_ranks(write, files, world)
    digests = _on_all_ranks(lambda: _durable_digests(partial, world), files, world)
    _on_all_ranks(name_it, files, world, only_first=True)
    return final


def _on_all_ranks(act: Callable[[], Any], files: RunFiles, world: World, *, only_first: bool = False) -> list[Any]:
    """Do something on all ranks, or on the first one; return the results of all.

    Raises:
        OSError: a rank could not write; on all ranks.
    """
    result, failure = None, None
    try:
        if world.is_first or not only_first:
            result = act()
    except (OSError, CheckpointException) as error:
        cause = _cause_of(error)
        if not isinstance(cause, OSError):
            raise cause from None
        failure = (cause.errno or errno.EIO, error_text(cause))
    outcomes = world.gather_objects((result, failure))
    for _, other in outcomes:
        if other is not None:
            raise disk_error(OSError(*other), files.checkpoints)
    return [other for other, _ in outcomes]


def _cause_of(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed, which torch's CheckpointException (a BaseException) wraps."""
    return min(error.failures.items())[1][0] if isinstance(error, CheckpointException) and error.failures else error


def _durable_digests(folder: Path, world: World) -> dict[str, str]:
    """Make this rank's share of the files durable; return their digests by name."""
    digests = {}
    for name in sorted(os.listdir(folder))[world.rank :: world.size]:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
        digests[name] = _digest(folder / name)
    return digests


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _manifest_text(record: dict[str, Any]) -> str:
    """Return the text of a manifest: the record, and the digest of the record."""
    text = json.dumps(record, sort_keys=True, allow_nan=False)
    return json.dumps({"record": record, "sha256": hashlib.sha256(text.encode()).hexdigest()}, indent=1) + "\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the record of a checkpoint: its progress, the identity of its run, and the digests of its files.

    Raises:
        DamagedCheckpointError: it is missing, damaged, or of another step than the folder.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        record: dict[str, Any] = manifest["record"]
        text = json.dumps(record, sort_keys=True, allow_nan=False)
        is_whole = hashlib.sha256(text.encode()).hexdigest() == manifest["sha256"]
    except OSError as error:
        raise DamagedCheckpointError(f"{MANIFEST}: {error_text(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedCheckpointError(f"{MANIFEST} is damaged") from None
    if not is_whole:
        raise DamagedCheckpointError(f"{MANIFEST} was changed")
    if record.keys() != _RECORD_KEYS or record["step"] != checkpoint_step(folder):
        raise DamagedCheckpointError(f"{MANIFEST} is of another version or step")
    return record


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, whole or not, oldest first."""
    return sorted((path for path in folder.glob("iter_*") if path.name[5:].isdigit()), key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(folder.name.removeprefix("iter_"))


def _prune(files: RunFiles, keep: int, step: int) -> None:
    """Remove all checkpoints but the newest `keep` up to this step: later ones were damaged. They are hidden first, so
    that no incomplete one ever has a proper name."""
    folders = list_checkpoints(files.checkpoints)
    past = [path for path in folders if checkpoint_step(path) <= step]
    for old in [*past[:-keep], *folders[len(past) :]]:
        hidden = old.with_name(f".saving-removed-{old.name}")
        os.replace(old, hidden)
        shutil.rmtree(hidden)


def checkpoints_to_resume(settings: Settings) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the records of the checkpoints that a run may resume from, by name, the newest first, and what is to be
    told about damaged ones. Whether their shards are whole is not looked at.

    Raises:
        ConfigError: there are some, but the newest whole one belongs to other settings, or none has a whole manifest.
    """
    files = RunFiles(Path(settings.output.folder))
    records: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for folder in list_checkpoints(files.checkpoints)[::-1]:
        try:
            record = read_manifest(folder)
        except DamagedCheckpointError as error:
            notes.append(f"{folder}: is damaged ({error})")
            continue
        if not records:
            check_same_run(settings, record["identity"], str(folder))
        records[folder.name] = record
    if notes and not records:
        raise _none_left(notes, files)
    return records, notes


def _none_left(notes: Sequence[str], files: RunFiles) -> ConfigError:
    return ConfigError(
        f"{'; '.join(notes)}; no whole checkpoint is left in {files.checkpoints}: restore one, or give another "
        "output.folder"
    )


def resume(training: TrainingModel) -> tuple[Progress, Path | None, list[str]]:
    """Load the newest whole checkpoint of the run's folder; every rank calls it.

    The first rank chooses; ranks share out the files and compare them with their digests. Where the newest checkpoint
    is damaged, the one before it is taken.

    Returns:
        The progress at the checkpoint, its folder (None: there is none, the run starts), and notes for the user.

    Raises:
        ConfigError: there are checkpoints, and none can be resumed.
    """
    world, settings = training.world, training.world.settings
    choice: Any = None
    if world.is_first:
        try:
            choice = checkpoints_to_resume(settings)
        except ConfigError as error:
            choice = error
    choice = world.gather_objects(choice)[0]
    if isinstance(choice, ConfigError):
        raise choice
    records, notes = choice
    files = RunFiles(Path(settings.output.folder))
    for name, record in records.items():
        folder = files.checkpoints / name
        damage = next(filter(None, world.gather_objects(_damage_of_share(folder, record["files"], world))), None)
        if damage is None:
            if notes:
                notes[-1] += f"; going on from {name}"
            return _load(folder, record, training), folder, notes
        notes.append(f"{folder}: is damaged ({damage})")
    if records:
        raise _none_left(notes, files)
    return Progress(), None, notes


def _damage_of_share(folder: Path, digests: dict[str, str], world: World) -> str | None:
    """Compare this rank's share of the files with their digests; return what is wrong with the first bad one."""
    for name in sorted(digests)[world.rank :: world.size]:
        try:
            if _digest(folder / name) != digests[name]:
                return f"{name} was changed"
        except OSError as error:
            return f"{name}: {error_text(error)}; ranks of all nodes must share output.folder"
    return None


def _load(folder: Path, record: dict[str, Any], training: TrainingModel) -> Progress:
    """Fill model, optimizer and schedule from a whole checkpoint; every rank calls it.

    Nothing in a step draws from a generator of random numbers (dropout has seeds of its own), so none is restored.
    """
    list(_adam_states(training.optimizer))  # makes those that are missing
    state = sharded_state(training, is_loading=True)
    merges, _ = extract_matching_values(
        state, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(state)
    try:
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(dict(named_shards(state)), storage_reader=reader, planner=_LoadPlanner())
    except (Exception, CheckpointException) as error:
        cause = _cause_of(error)
        if isinstance(cause, ConfigError) or is_lost_rank_error(cause) or is_out_of_memory(cause):
            raise cause from None
        raise ConfigError(
            f"{folder}: cannot be loaded ({error_text(cause)}); move it away to go on from the one before"
        ) from None
    loaded = apply_factory_merges(dict_list_map_inplace(_loaded_value, state), merges)
    training.model.load_state_dict(loaded["model"], strict=True)
    with torch.no_grad():
        training.optimizer.load_state_dict(loaded["optimizer"])
    for of_weight in _adam_states(training.optimizer):  # Megatron expects Apex's Adam, whose groups count, not weights
        of_weight["step"] = torch.tensor(float(record["step"] - record["skipped_steps"]))
    training.schedule.num_steps = 0
    training.schedule.step(record["step"])
    known = {field.name: record[field.name] for field in fields(Progress)}
    return Progress(**{**known, "losses": tuple(known["losses"])})


def _loaded_value(value: Any) -> Any:
    """Return what a value of Megatron's sharded state holds."""
    if isinstance(value, LocalNonpersistentObject):
        return value.unwrap()
    return value.data if isinstance(value, (ShardedTensor, ShardedObject)) else value
