"""State on disk: Megatron's distributed checkpoints, written to a hidden folder and renamed when they are complete.

A checkpoint exists as a whole or not at all: shards are written to a hidden folder and made durable, the folder is
renamed, and only then does `latest` name it. The next save removes what a crash leaves behind. run.json beside the
shards holds everything that is not a tensor, readable without torch.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.train.checkpoint_digests import (
    DamagedCheckpointError,
    file_digest,
    write_digests,
)
from mindspeed_cp.train.checkpoint_folder import hold_new
from mindspeed_cp.train.checkpoint_state import first_cause, sharded_random_state, sharded_state
from mindspeed_cp.train.checkpoint_writer import Copies, InProcessSave
from mindspeed_cp.train.held_folder import HeldFolder
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.resume import (
    checkpoint_step,
    list_checkpoints,
    read_latest,
    read_run_json,
)
from mindspeed_cp.train.run_files import (
    RunFiles,
    disk_error,
    disk_errors_for,
    sync_folder,
    write_text,
)
from mindspeed_cp.train.run_identity import identity
from mindspeed_cp.train.world import World

with megatron_imports():
    from megatron.core import dist_checkpointing

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
    held = hold_new(partial, settings, world)
    state = {**sharded_state(training, is_loading=False), "rng": sharded_random_state(world)}
    shards = InProcessSave(
        held, copies, {buffer.untyped_storage().data_ptr() for part in training.models for buffer in part.buffers()}
    )
    with _shard_errors_for(files.checkpoints):
        dist_checkpointing.save(state, str(held.path), sharded_strategy=shards)
    return BegunSave(files, progress, settings, world, held, shards)


@dataclass(frozen=True)
class BegunSave:
    """A checkpoint whose shards are to be written, in a hidden folder; a crash leaves the one before as it is."""

    files: RunFiles
    progress: Progress
    settings: Settings
    world: World
    held: HeldFolder
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
        final, held = files.checkpoint(progress.step), self.held
        with _shard_errors_for(files.checkpoints):
            digests = self.shards.finish()
        if world.is_first:
            run = {
                **vars(progress),
                "ranks": world.size,
                "identity": identity(settings),
                "settings": settings.model_dump(mode="json"),
            }
            with disk_errors_for(files.checkpoints):
                (held.path / "run.json").write_text(json.dumps(run, indent=1, allow_nan=False) + "\n", encoding="utf-8")
                others = {path.name for path in held.path.iterdir()} - digests.keys()
                digests |= {name: file_digest(held.open(name)) for name in others}
                write_digests(held, final.name, digests)
                _make_durable(held.path)
                if final.exists():
                    _hide(final)
                os.replace(_partial(final), final)
                if not held.is_at(final):
                    raise OSError(errno.ESTALE, "somebody put another folder in the place of the checkpoint")
                sync_folder(files.checkpoints)
                if not progress.spike:
                    write_text(files.latest, final.name + "\n")
                _prune(files, settings.checkpoint.keep, progress)
        held.close()
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
        cause = first_cause(error)
        if isinstance(cause, RuntimeError) and any(part in str(cause) for part in _STREAM_ERRORS):
            cause = OSError(errno.EIO, "the disk is full, or fails")
        if isinstance(cause, OSError):
            raise disk_error(cause, folder) from None
        raise cause from None


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
