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
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.megatron.patches.imports import parse_version
from mindspeed_cp.train import optimizer_state
from mindspeed_cp.train.checkpoint_writer import InProcessSave
from mindspeed_cp.train.failures import is_lost_rank_error, is_out_of_memory
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.random_state import get_random_state, set_random_state
from mindspeed_cp.train.resume import checkpoint_step, list_checkpoints, read_run_json, recovery_hint
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

    Checkpoints of later steps, left by a run that was then resumed at an older one, are removed.

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
    if world.is_first:
        run = {
            "step": progress.step,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            "data": progress.data,
            "ranks": world.size,
            "identity": identity(settings),
        }
        with disk_errors_for(files.checkpoints):
            write_json(partial / "run.json", run)
            _make_durable(partial)
            if final.exists():
                _remove(final)
            os.replace(partial, final)
            sync_folder(files.checkpoints)
            write_text(files.latest, final.name + "\n")
            _prune(files.checkpoints, settings.checkpoint.keep, progress.step)
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


def _cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed, which torch wraps."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error


def load(folder: Path, training: TrainingModel, world: World) -> Progress:
    """Fill model, optimizer, schedule and random state from a checkpoint; every rank calls it.

    The number of ranks may differ from that of the run that wrote it; random states then stay those of the seed.

    Raises:
        ConfigError: It is damaged; names the checkpoint before it, if there is one.
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
        raise ConfigError(f"{folder}: is damaged ({cause_text}); {recovery_hint(folder)}") from None
    finally:
        logger.removeFilter(_is_not_noise)
    training.gpt.load_state_dict(loaded["model"], strict=True)
    optimizer_state.load(training.optimizer, loaded["optimizer"])
    training.schedule.load_state_dict(loaded["schedule"])
    if "rng" in loaded:
        set_random_state(loaded["rng"])
    return Progress(step=run["step"], tokens=run["tokens"], seconds=run["seconds"], data=run["data"])


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


def _prune(folder: Path, keep: int, step: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, and all of later steps: they belong to an abandoned
    run."""
    checkpoints = list_checkpoints(folder)
    past = [path for path in checkpoints if checkpoint_step(path) <= step]
    for old in [*past[:-keep], *checkpoints[len(past) :]]:
        _remove(old)


def _remove(folder: Path) -> None:
    """Rename a checkpoint and remove it, so that no incomplete one ever has a proper name."""
    renamed = folder.with_name(f".saving-removed-{folder.name}")
    os.replace(folder, renamed)
    shutil.rmtree(renamed)
