"""Which settings make a run what it is: a checkpoint may only go on under equal ones.

Everything that changes the numbers counts: model, data, order, optimizer, schedule.  How the work is split over ranks,
recomputed, prefetched or shown does not (beyond rounding), so a run may go on with other ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_cp.config import Settings
from mindspeed_cp.config_errors import show
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.files import RunFiles

_NOT_MODEL = {"recompute_granularity"}
_TRAIN = (
    *("global_batch_size", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "bf16", "seed", "use_distributed_optimizer"),
)
_LENGTH = {"train_iters", "lr_decay_iters", "max_restarts"}


def identity(settings: Settings) -> dict[str, Any]:
    """The settings that a checkpoint is bound to, by dotted key, with defaults that depend on others filled in."""
    model, data, train = settings.model, settings.data, settings.train
    filled = {"num_query_groups": model.kv_heads, "kv_channels": model.head_dim, "ffn_hidden_size": model.ffn_size}
    found: dict[str, Any] = {
        f"model.{key}": filled.get(key, value) for key, value in model.model_dump().items() if key not in _NOT_MODEL
    }
    found |= {f"data.{key}": value for key, value in data.model_dump().items()}
    if not model.attention_dropout:  # what is dropped depends on rows; nothing else does but rounding
        del found["data.balance"]
    found |= {f"train.{key}": getattr(train, key) for key in _TRAIN}
    if train.lr_decay_style != "constant":
        found["train.lr_decay_iters"] = train.lr_decay_iters or train.train_iters
    return found


def check_same_run(settings: Settings, saved: dict[str, Any], checkpoint: str) -> None:
    """Raise ConfigError, naming the settings, unless a checkpoint belongs to these settings."""
    now = identity(settings)
    # An older version that did not know a setting had no other value than the default.
    saved = {key: value for key, value in _defaults().items() if key in now} | saved
    different = [key for key in now | saved if now.get(key) != saved.get(key)]
    if not different:
        return
    changes = [f"{_name(key, settings)} was {show(saved.get(key))} and is {show(now.get(key))}" for key in different]
    decay = "train.lr_decay_iters"
    longer = f" (to train longer on the old schedule: {decay} = {saved[decay]})" if different == [decay] else ""
    raise ConfigError(
        f"{checkpoint} belongs to other settings: {'; '.join(changes)}; "
        f"go on with the old ones{longer}, or give another output.folder"
    )


def _defaults() -> dict[str, Any]:
    """What checkpoints of versions that did not know these settings are bound to."""
    found = {key: value for key, value in identity(Settings()).items() if key.startswith("model.")}
    return found | {"data.balance": Settings().data.balance}


def other_settings(path: Path, settings: Settings) -> list[str]:
    """How the last start did its work, where that differs: "context_parallel_suite.algorithm was ring and is direct".

    What a checkpoint is bound to cannot differ (`check_same_run`); this is the rest, the length of the run and what
    concerns files and the screen left out. What starts before the last one did is not known.

    Args:
        path: settings.yaml of the run, which its last start wrote after its first step; nothing is said where it cannot
            be read.
        settings: those of now.
    """
    import yaml

    try:
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    now = settings.model_dump()
    found = []
    for section in ("model", "data", "context_parallel_suite", "train"):
        old = before.get(section) if isinstance(before, dict) else None
        for key, value in now[section].items():
            if isinstance(old, dict) and old.get(key, value) != value and key not in _LENGTH:
                found.append(f"{section}.{key} was {show(old[key])} and is {show(value)}")
    return found


def other_settings_note(path: Path, settings: Settings) -> str | None:
    """One line that says `other_settings`; None where there are none."""
    other = other_settings(path, settings)
    return f"this run was last started with other settings: {'; '.join(other)}" if other else None


def complete_note(files: RunFiles, settings: Settings) -> str:
    """That a run is complete, and which settings make it go on."""
    train = settings.train
    old_schedule = ""
    if train.lr_decay_style != "constant" and train.lr_decay_iters is None:
        old_schedule = f" and keep its schedule, train.lr_decay_iters = {train.train_iters}"
    return (
        f"this run is complete, so nothing is done: to go on, raise train.train_iters{old_schedule}; to start anew, "
        f"give another output.folder than {files.folder}"
    )


def _name(key: str, settings: Settings) -> str:
    if key == "train.lr_decay_iters" and settings.train.lr_decay_iters is None:
        return "train.lr_decay_iters (null: train.train_iters)"
    return key
