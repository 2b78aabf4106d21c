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
from contextlib import suppress
from dataclasses import replace
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
from mindspeed_cp.train.checkpoint_writer import InProcessSave
from mindspeed_cp.train.failures import is_lost_rank_error, is_out_of_memory
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.random_state import get_random_state, set_random_state
from mindspeed_cp.train.resume import checkpoint_step, checkpoints_to_resume, list_checkpoints, read_run_json
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
    """Write a checkpoint and return its folder; every rank calls it.

    Checkpoints of this run at later steps, left when it was resumed at an older one, are removed. What another run left
    in the folder stays.

    Raises:
        DiskError: It cannot be written; the newest checkpoint before it stays the newest.
    """
    final = files.checkpoint(progress.step)
    partial = final.with_name(f".saving-{final.name}")
    if world.is_first:
        with disk_errors_for(files.checkpoints):
            for leftover in files.checkpoints.glob(".saving-*"):
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)
    world.barrier()
    state = {**_state(training, is_loading=False), "rng": _random_state(world)}
    _write_shards(state, partial)
    world.barrier()
    digests = _digest_shards(partial, world)
    if world.is_first:
        run = {
            "step": progress.step,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            "data": progress.data,
            "ranks": world.size,
            "run_id": progress.run_id,
            "identity": identity(settings),
        }
        with disk_errors_for(files.checkpoints):
            write_json(partial / "run.json", run)
            digests["run.json"] = file_digest(partial / "run.json")
            write_digests(partial, final.name, digests)
            _make_durable(partial)
            if final.exists():
                _remove(final)
            os.replace(partial, final)
            sync_folder(files.checkpoints)
            write_text(files.latest, final.name + "\n")
            _prune(files.checkpoints, settings.checkpoint.keep, progress)
    world.barrier()
    return final


def _write_shards(state: dict[str, Any], folder: Path) -> None:
    """Write Megatron's shards. All ranks raise DiskError if one cannot write its files."""
    try:
        dist_checkpointing.save(state, str(folder), sharded_strategy=InProcessSave())
    except (OSError, RuntimeError, CheckpointException) as error:
        cause = _cause(error)
        if isinstance(cause, RuntimeError) and any(part in str(cause) for part in _STREAM_ERRORS):
            cause = OSError(errno.EIO, "the disk is full, or fails")
        if isinstance(cause, OSError):
            raise disk_error(cause, folder.parent) from None
        raise cause from None


def _digest_shards(folder: Path, world: World) -> dict[str, str]:
    """Return the digest of each file of Megatron's, by its name: every rank reads back a share of them.

    Raises:
        DiskError: a rank cannot read its share; raised on all ranks.
    """
    problem, digests = None, {}
    try:
        for name in sorted(path.name for path in folder.iterdir())[world.rank :: world.size]:
            digests[name] = file_digest(folder / name)
    except OSError as error:
        problem = error_text(error)
    shares = world.gather_json([problem, digests])
    problems = [problem for problem, _ in shares if problem is not None]
    if problems:
        raise disk_error(OSError(errno.EIO, problems[0]), folder.parent)
    return {name: digest for _, share in shares for name, digest in share.items()}


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
        return load(folder, training, world), folder, notes
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


def load(folder: Path, training: TrainingModel, world: World) -> Progress:
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
    training.schedule.load_state_dict(loaded["schedule"])
    if "rng" in loaded:
        set_random_state(loaded["rng"])
    progress = Progress(step=run["step"], tokens=run["tokens"], seconds=run["seconds"], data=run["data"])
    return replace(progress, run_id=run["run_id"]) if "run_id" in run else progress


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


def _prune(folder: Path, keep: int, progress: Progress) -> None:
    """Remove this run's checkpoints but the newest `keep` up to this step: those of later steps belong to an abandoned
    future. Those of other runs stay, and so does what cannot be read."""
    own = []
    for path in list_checkpoints(folder):
        with suppress(DamagedCheckpointError):
            if read_run_json(path).get("run_id") == progress.run_id:
                own.append(path)
    past = [path for path in own if checkpoint_step(path) <= progress.step]
    for old in [*past[:-keep], *own[len(past) :]]:
        _remove(old)


def _remove(folder: Path) -> None:
    """Rename a checkpoint and remove it, so that no incomplete one ever has a proper name."""
    renamed = folder.with_name(f".saving-removed-{folder.name}")
    os.replace(folder, renamed)
    shutil.rmtree(renamed)
