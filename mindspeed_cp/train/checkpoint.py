"""State on disk: Megatron's distributed checkpoints, written aside and renamed when they are complete.

A checkpoint is either there as a whole or not at all: shards are written to a hidden folder and made durable, the
folder is renamed, and only then does `latest` name it.  What a crash leaves behind is removed by the next save.
run.json beside the shards tells everything that is no tensor, readable without torch.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import CheckpointException

from mindspeed_cp.config import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.megatron.imports import parse_version
from mindspeed_cp.train import optimizer_state
from mindspeed_cp.train.checkpoint_writer import InProcessSave
from mindspeed_cp.train.files import RunFiles, disk_error, reason, sync_folder, write_json, write_text, writing
from mindspeed_cp.train.identity import identity
from mindspeed_cp.train.model import Parts
from mindspeed_cp.train.resume import checkpoints_in, read_run, step_of, what_else
from mindspeed_cp.train.worker import is_lost_peer
from mindspeed_cp.train.world import World

with megatron_imports():
    import megatron.core
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject

_HAS_COMMON_FILE = parse_version(megatron.core.__version__) < (0, 19)
# What torch says to Megatron while a checkpoint is read.
_KNOWN_NOISE = ("`load_state_dict` is deprecated", "Please use DTensor instead")
# What torch.save says where a write fails; it does not say why.
_STREAM_ERRORS = ("iostream error", "inline_container", "PytorchStreamWriter")


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step.

    Attributes:
        step: optimizer steps done.
        tokens: tokens trained on so far, over all ranks.
        seconds: time spent in steps so far.
        data: state of the data stream.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    data: dict[str, Any] | None = None


def save(files: RunFiles, parts: Parts, progress: Progress, settings: Settings, world: World) -> Path:
    """Write a checkpoint; every rank calls it.  Returns its folder.

    Checkpoints of later steps, which a run that was resumed at an older one has left behind, are removed.

    Raises:
        DiskError: it cannot be written; the newest checkpoint before it stays, and stays the newest.
    """
    final = files.checkpoint(progress.step)
    aside = final.with_name(f".saving-{final.name}")
    if world.is_first:
        with writing(files.checkpoints):
            for left in files.checkpoints.glob(".saving-*"):
                shutil.rmtree(left)
            aside.mkdir(parents=True)
    world.barrier()
    state = {**_state(parts, is_loading=False), "rng": _random_state(world)}
    _write_shards(state, aside)
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
        with writing(files.checkpoints):
            write_json(aside / "run.json", run)
            _make_durable(aside)
            if final.exists():
                _remove(final)
            os.replace(aside, final)
            sync_folder(files.checkpoints)
            write_text(files.latest, final.name + "\n")
            _prune(files.checkpoints, settings.checkpoint.keep, progress.step)
    world.barrier()
    return final


def _write_shards(state: dict[str, Any], folder: Path) -> None:
    """Megatron's part of a checkpoint.  DiskError, on all ranks, if a rank cannot write its files."""
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
    """What happened on the first rank that failed; torch wraps it."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error


def load(folder: Path, parts: Parts, world: World) -> Progress:
    """Fill model, optimizer, schedule and random state from a checkpoint; every rank calls it.

    The number of ranks may differ from that of the run that wrote it; random states are then those of the seed.

    Raises:
        ConfigError: it is damaged; names the one before it, if there is one.
    """
    run = read_run(folder)
    optimizer_state.prepare_to_load(parts.optimizer)
    wanted = _state(parts, is_loading=True)
    if run["ranks"] == world.size:
        wanted["rng"] = _random_state(world)
    logger = logging.getLogger()  # torch uses the root logger here
    logger.addFilter(_is_news)
    try:
        # Megatron says something else.  0.19 has no such file, but reads those of older versions.
        if _HAS_COMMON_FILE and not (folder / "common.pt").exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / "common.pt"))
        with warnings.catch_warnings():
            for text in _KNOWN_NOISE:
                warnings.filterwarnings("ignore", message=text, category=FutureWarning)
            found = dist_checkpointing.load(wanted, str(folder))
    except (Exception, CheckpointException) as error:  # pickle may raise anything for a file that is cut short
        cause = _cause(error)
        if not isinstance(cause, Exception) or is_lost_peer(cause) or _is_memory(cause):
            raise cause from None
        lost = f"{Path(cause.filename).name}: " if isinstance(cause, OSError) and cause.filename else ""
        what = lost + reason(cause).split(". ")[0]
        raise ConfigError(f"{folder}: is damaged ({what}); {what_else(folder)}") from None
    finally:
        logger.removeFilter(_is_news)
    parts.gpt.load_state_dict(found["model"], strict=True)
    optimizer_state.load(parts.optimizer, found["optimizer"])
    parts.schedule.load_state_dict(found["schedule"])
    if "rng" in found:
        _set_random_state(found["rng"])
    return Progress(step=run["step"], tokens=run["tokens"], seconds=run["seconds"], data=run["data"])


def _is_news(record: logging.LogRecord) -> bool:
    """False for torch's stack trace of a damaged .metadata, which `load` tells in one line."""
    return "Global metadata is not found" not in str(record.msg)


def _is_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _state(parts: Parts, *, is_loading: bool) -> dict[str, Any]:
    """What is saved and loaded, with where each part of it belongs."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
    }
    model = parts.gpt.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    optimizer = parts.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "schedule": parts.schedule.state_dict()}


def _random_state(world: World) -> ShardedObject:
    """The random state of this rank."""
    state = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", state, (world.size,), (world.rank,), replica_id=0)


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def _make_durable(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _prune(folder: Path, keep: int, step: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, and all of later steps: their future is abandoned."""
    found = checkpoints_in(folder)
    past = [path for path in found if step_of(path) <= step]
    for old in [*past[:-keep], *found[len(past) :]]:
        _remove(old)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, renamed first, so that no half of one ever has a proper name."""
    gone = folder.with_name(f".saving-removed-{folder.name}")
    os.replace(folder, gone)
    shutil.rmtree(gone)
