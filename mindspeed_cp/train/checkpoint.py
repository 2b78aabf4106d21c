"""State on disk: Megatron's distributed checkpoints, written to a hidden folder and renamed when they are complete.

A checkpoint exists as a whole or not at all: shards are written to a hidden folder and made durable, the folder is
renamed, and only then does `latest` name it. The next save removes what a crash leaves behind. run.json beside the
shards holds everything that is not a tensor, readable without torch.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.megatron.patches.imports import parse_version
from mindspeed_cp.train import optimizer_state
from mindspeed_cp.train.checkpoint_digests import (
    DamagedCheckpointError,
    file_digest,
    find_damage,
    signing_key,
    write_digests,
)
from mindspeed_cp.train.checkpoint_writer import Copies, InProcessSave
from mindspeed_cp.train.failures import is_lost_rank_error, is_out_of_memory
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.random_state import get_random_state, set_random_state
from mindspeed_cp.train.resume import (
    checkpoint_step,
    checkpoints_to_resume,
    list_checkpoints,
    read_latest,
    read_run_json,
)
from mindspeed_cp.train.run_files import (
    RunFiles,
    disk_error,
    disk_errors_for,
    error_text,
    sync_folder,
    write_json,
    write_text,
)
from mindspeed_cp.train.run_identity import identity
from mindspeed_cp.train.world import World

with megatron_imports():
    import megatron.core
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

_HAS_COMMON_FILE = parse_version(megatron.core.__version__) < (0, 19)
# Warnings of torch to Megatron while a checkpoint is read.
_KNOWN_NOISE = ("`load_state_dict` is deprecated", "Please use DTensor instead")
# Parts of torch.save's message when a write fails; it does not name the cause.
_STREAM_ERRORS = ("iostream error", "inline_container", "PytorchStreamWriter")


def save(files: RunFiles, training: TrainingModel, progress: Progress, settings: Settings, world: World) -> Path:
    """Write a checkpoint and return its folder; every rank calls it. See `begin_save`."""
    begun = begin_save(files, training, progress, settings, world)
    begun.shards.write()
    folder = begun.finish()
    if world.is_first:
        remove_hidden(files)
    return folder


def begin_save(
    files: RunFiles,
    training: TrainingModel,
    progress: Progress,
    settings: Settings,
    world: World,
    copies: Copies | None = None,
) -> BegunSave:
    """Begin a checkpoint: agree on who writes what; every rank calls it.

    Args:
        files: files of the run.
        training: model, optimizer and schedule.
        progress: state of the run after the step.
        settings: settings of the run.
        world: this rank among all.
        copies: where to copy this rank's shards, for training that goes on before they are written; None: it does not.

    Raises:
        DiskError: It cannot be written; the newest checkpoint before it stays the newest.
    """
    partial = _partial(files.checkpoint(progress.step))
    if world.is_first:
        with disk_errors_for(files.checkpoints):
            remove_hidden(files)
            partial.mkdir(parents=True)
    world.barrier()
    state = {**_state(training, is_loading=False), "rng": _random_state(world)}
    shards = InProcessSave(copies, {buffer.untyped_storage().data_ptr() for buffer in training.gpt.buffers()})
    with _shard_errors_for(files.checkpoints):
        dist_checkpointing.save(state, str(partial), sharded_strategy=shards)
    return BegunSave(files, progress, settings, world, shards)


@dataclass(frozen=True)
class BegunSave:
    """A checkpoint whose shards are to be written, in a hidden folder; a crash leaves the one before as it is."""

    files: RunFiles
    progress: Progress
    settings: Settings
    world: World
    shards: InProcessSave

    def finish(self) -> Path:
        """Give the checkpoint its name, after `shards.write` on every rank; every rank calls it.

        Checkpoints of this run at later steps, left when it was resumed at an older one, are hidden, and so are those
        beyond checkpoint.keep; `remove_hidden` removes them. What another run left in the folder stays.

        Returns:
            The folder of the checkpoint.

        Raises:
            DiskError: It cannot be written; the newest checkpoint before it stays the newest.
        """
        files, progress, settings, world = self.files, self.progress, self.settings, self.world
        final = files.checkpoint(progress.step)
        partial = _partial(final)
        with _shard_errors_for(files.checkpoints):
            digests = self.shards.finish()
        if world.is_first:
            run = {
                **vars(progress),
                "ranks": world.size,
                "identity": identity(settings),
            }
            with disk_errors_for(files.checkpoints):
                write_json(partial / "run.json", run)
                others = {path.name for path in partial.iterdir()} - digests.keys()
                digests |= {name: file_digest(partial / name) for name in others}
                write_digests(partial, final.name, digests)
                _make_durable(partial)
                if final.exists():
                    _hide(final)
                os.replace(partial, final)
                sync_folder(files.checkpoints)
                if not progress.spike:
                    write_text(files.latest, final.name + "\n")
                _prune(files, settings.checkpoint.keep, progress)
        world.barrier()
        return final


def _partial(final: Path) -> Path:
    """Return the hidden folder of a checkpoint that is not complete."""
    return final.with_name(f".saving-{final.name}")


@contextmanager
def _shard_errors_for(folder: Path) -> Iterator[None]:
    """Raise DiskError, on all ranks, if one cannot write its shards within this block."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        cause = _cause(error)
        if isinstance(cause, RuntimeError) and any(part in str(cause) for part in _STREAM_ERRORS):
            cause = OSError(errno.EIO, "the disk is full, or fails")
        if isinstance(cause, OSError):
            raise disk_error(cause, folder) from None
        raise cause from None


def resume(settings: Settings, training: TrainingModel, world: World) -> tuple[Progress, Path | None, list[str]]:
    """Load the newest whole checkpoint of the run's folder; every rank calls it.

    The first rank chooses, since the key that signs checkpoints may be on its machine alone. All files are compared
    with their digests before one is loaded. Where the newest checkpoint is damaged, the one before it is taken.

    Returns:
        The progress at the checkpoint, its folder (None: there is none, the run starts), and notes for the user.

    Raises:
        ConfigError: there are checkpoints, and none can be resumed.
    """
    chosen = world.broadcast_json(_choose(settings) if world.is_first else None)
    if "error" in chosen:
        raise ConfigError(chosen["error"])
    notes: list[str] = chosen["notes"]
    for folder, digests in ((Path(text), digests) for text, digests in chosen["digests"].items()):
        damage = next(filter(None, world.gather_json(find_damage(folder, digests, world.rank, world.size))), None)
        if damage is not None:
            notes.append(f"{folder}: is damaged ({damage})")
            continue
        if notes:
            notes[-1] += f"; going on from {folder.name}"
        return load(folder, settings, training, world), folder, notes
    if chosen["digests"]:
        raise ConfigError(
            f"{'; '.join(notes)}; no whole checkpoint is left: restore one, or give another output.folder"
        )
    return Progress(), None, notes


def _choose(settings: Settings) -> dict[str, Any]:
    """Return the checkpoints to try, with the digests of their files; called on the first rank, whose key counts."""
    try:
        signing_key()
        folders, notes = checkpoints_to_resume(settings)
    except ConfigError as error:
        return {"error": str(error)}
    return {"digests": {str(folder): digests for folder, digests in folders.items()}, "notes": notes}


def _cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed, which torch wraps."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error


def load(folder: Path, settings: Settings, training: TrainingModel, world: World) -> Progress:
    """Fill model, optimizer, schedule and random state from a whole checkpoint; every rank calls it.

    The number of ranks may differ from that of the run that wrote it; random states then stay those of the seed.

    Raises:
        ConfigError: It cannot be loaded.
    """
    run = read_run_json(folder)
    optimizer_state.prepare_to_load(training.optimizer)
    state = _state(training, is_loading=True)
    if run["ranks"] == world.size:
        state["rng"] = _random_state(world)
    logger = logging.getLogger()  # torch uses the root logger here
    logger.addFilter(_is_not_noise)
    try:
        # Megatron's own error names another cause. 0.19 has no such file, but reads those of older versions.
        if _HAS_COMMON_FILE and not (folder / "common.pt").exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / "common.pt"))
        with warnings.catch_warnings():
            for text in _KNOWN_NOISE:
                warnings.filterwarnings("ignore", message=text, category=FutureWarning)
            loaded = dist_checkpointing.load(state, str(folder))
    except (Exception, CheckpointException) as error:  # pickle may raise anything for a file that is cut short
        cause = _cause(error)
        if not isinstance(cause, Exception) or is_lost_rank_error(cause) or is_out_of_memory(cause):
            raise cause from None
        file = f"{Path(cause.filename).name}: " if isinstance(cause, OSError) and cause.filename else ""
        cause_text = file + error_text(cause).split(". ")[0]
        raise ConfigError(
            f"{folder}: cannot be loaded ({cause_text}); restore it, or move it away to go on from the one before"
        ) from None
    finally:
        logger.removeFilter(_is_not_noise)
    training.gpt.load_state_dict(loaded["model"], strict=True)
    optimizer_state.load(training.optimizer, loaded["optimizer"])
    training.schedule.num_steps = 0  # loading adds to it
    training.schedule.load_state_dict(loaded["schedule"])
    optimizer_state.set_rates(training.optimizer, settings.train)
    if "rng" in loaded:
        set_random_state(loaded["rng"])
    known = {field.name: run[field.name] for field in fields(Progress) if field.name in run}  # older ones lack some
    return replace(Progress(**known), losses=tuple(known.get("losses", ())))


def _is_not_noise(record: logging.LogRecord) -> bool:
    """Return False for torch's stack trace of a damaged .metadata, which `load` reports in one line."""
    return "Global metadata is not found" not in str(record.msg)


def _state(training: TrainingModel, *, is_loading: bool) -> dict[str, Any]:
    """Return what is saved and loaded, as sharded tensors and objects."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
    }
    model = training.gpt.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    optimizer = training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "schedule": training.schedule.state_dict()}


def _random_state(world: World) -> ShardedObject:
    """Return the random state of this rank as an object of the checkpoint."""
    return ShardedObject("rng", get_random_state(), (world.size,), (world.rank,), replica_id=0)


def _make_durable(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _prune(files: RunFiles, keep: int, progress: Progress) -> None:
    """Hide this run's checkpoints but the newest `keep` up to this step and the one that `latest` names: those of later
    steps belong to an abandoned future. Those of other runs stay, and so does what cannot be read."""
    own, (latest, _) = [], read_latest(files)
    for path in list_checkpoints(files.checkpoints):
        with suppress(DamagedCheckpointError):
            if read_run_json(path).get("run_id") == progress.run_id:
                own.append(path)
    past = [path for path in own if checkpoint_step(path) <= progress.step]
    for old in [*past[:-keep], *own[len(past) :]]:
        if old.name != latest:
            _hide(old)


def _hide(folder: Path) -> None:
    """Rename a checkpoint that is to be removed, so that no incomplete one ever has a proper name."""
    os.replace(folder, folder.with_name(f".saving-removed-{folder.name}"))


def remove_hidden(files: RunFiles) -> None:
    """Remove hidden checkpoints, and what a crash left of one; not while a save runs."""
    for leftover in files.checkpoints.glob(".saving-*"):
        shutil.rmtree(leftover)
