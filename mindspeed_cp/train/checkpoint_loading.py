"""Resume from the newest whole checkpoint: fill the model, the optimizer and the random states from it."""

from __future__ import annotations

import errno
import logging
import os
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.megatron.patches.imports import parse_version
from mindspeed_cp.train import optimizer_state
from mindspeed_cp.train.checkpoint_digests import signing_key
from mindspeed_cp.train.checkpoint_folder import hold_whole
from mindspeed_cp.train.checkpoint_state import first_cause, model_keys, sharded_random_state, sharded_state
from mindspeed_cp.train.failures import is_lost_rank_error, is_out_of_memory
from mindspeed_cp.train.held_folder import HeldFolder
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.random_state import set_random_state
from mindspeed_cp.train.resume import (
    checkpoint_name,
    checkpoint_step,
    checkpoints_to_resume,
    read_run_json,
)
from mindspeed_cp.train.run_files import RunFiles, error_text
from mindspeed_cp.train.world import World

with megatron_imports():
    import megatron.core
    from megatron.core import dist_checkpointing

_HAS_COMMON_FILE = parse_version(megatron.core.__version__) < (0, 19)
# Warnings of torch to Megatron while a checkpoint is read.
_KNOWN_NOISE = ("`load_state_dict` is deprecated", "Please use DTensor instead")


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
    checkpoints = RunFiles(Path(settings.output.folder)).checkpoints
    for name, digests in chosen["digests"].items():
        folder = checkpoints / checkpoint_name(name)
        held, damage = hold_whole(folder, digests, settings, world)
        if held is None or damage is not None:
            notes.append(f"{folder}: is damaged ({damage})")
            continue
        if notes:
            notes[-1] += f"; going on from {folder.name}"
        progress = load(folder, held, settings, training, world)
        held.close()
        return progress, folder, notes
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
    return {"digests": {folder.name: digests for folder, digests in folders.items()}, "notes": notes}


def load(folder: Path, held: HeldFolder, settings: Settings, training: TrainingModel, world: World) -> Progress:
    """Fill model, optimizer, schedule and random state from a whole checkpoint; every rank calls it.

    The number of ranks may differ from that of the run that wrote it; random states then stay those of the seed.

    Args:
        folder: path of the checkpoint, for messages.
        held: its folder.
        settings, training, world: of this run.

    Raises:
        ConfigError: It cannot be loaded.
    """
    run = read_run_json(held.path, checkpoint_step(folder))
    optimizer_state.prepare_to_load(training.optimizer)
    state = sharded_state(training, is_loading=True)
    if run["ranks"] == world.size:
        state["rng"] = sharded_random_state(world)
    logger = logging.getLogger()  # torch uses the root logger here
    logger.addFilter(_is_not_noise)
    try:
        # Megatron's own error names another cause. 0.19 has no such file, but reads those of older versions.
        if _HAS_COMMON_FILE and not (held.path / "common.pt").exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / "common.pt"))
        with warnings.catch_warnings():
            for text in _KNOWN_NOISE:
                warnings.filterwarnings("ignore", message=text, category=FutureWarning)
            loaded = dist_checkpointing.load(state, str(held.path))
    except (Exception, CheckpointException) as error:  # pickle may raise anything for a file that is cut short
        cause = first_cause(error)
        if not isinstance(cause, Exception) or is_lost_rank_error(cause) or is_out_of_memory(cause):
            raise cause from None
        file = f"{Path(cause.filename).name}: " if isinstance(cause, OSError) and cause.filename else ""
        cause_text = file + error_text(cause).split(". ")[0]
        raise ConfigError(
            f"{folder}: cannot be loaded ({cause_text}); restore it, or move it away to go on from the one before"
        ) from None
    finally:
        logger.removeFilter(_is_not_noise)
    for key, part in zip(model_keys(training), training.models, strict=True):
        part.load_state_dict(loaded[key], strict=True)
    optimizer_state.load(training.optimizer, loaded["optimizer"])
    training.schedule.num_steps = 0  # loading adds to it
    training.schedule.load_state_dict(loaded["schedule"])
    optimizer_state.set_rates(training.optimizer, settings.train)
    training.fused.use_in_optimizer(training.optimizer)
    if "rng" in loaded:
        set_random_state(loaded["rng"])
    known = {field.name: run[field.name] for field in fields(Progress) if field.name in run}  # older ones lack some
    return replace(Progress(**known), losses=tuple(known.get("losses", ())))


def _is_not_noise(record: logging.LogRecord) -> bool:
    """Return False for torch's stack trace of a damaged .metadata, which `load` reports in one line."""
    return "Global metadata is not found" not in str(record.msg)
