"""Settings that identify a run: a checkpoint can be resumed only with equal ones.

They are those that change the numbers: model, data, order, schedule. How the work is split over ranks, recomputed,
prefetched or shown changes only rounding, so a run may be resumed with other ranks. The rates of the optimizer may
change on resume, as a run whose loss diverges needs; the change is told and written to metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.messages import format_value
from mindspeed_cp.train.run_files import RunFiles

_NOT_MODEL = {"recompute_granularity"}
_NOT_DATA = {"pool_ranks"}
_TRAIN = ("global_batch_size", "lr_decay_style", "lr_warmup_iters", "bf16", "seed", "use_distributed_optimizer")
_LENGTH = {"train_iters", "lr_decay_iters", "compare"}


def identity(settings: Settings) -> dict[str, Any]:
    """Return the settings that identify a run, by dotted key, with defaults that depend on others filled in."""
    model, data, train = settings.model, settings.data, settings.train
    filled = {
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.resolved_ffn_hidden_size,
    }
    values: dict[str, Any] = {
        f"model.{key}": filled.get(key, value) for key, value in model.model_dump().items() if key not in _NOT_MODEL
    }
    values |= {f"data.{key}": value for key, value in data.model_dump().items() if key not in _NOT_DATA}
    if not model.attention_dropout:  # else the dropped weights depend on the rows
        del values["data.balance"]
    elif data.balance == "pool":  # documents keep the numbers by which weights are dropped, as with time
        values["data.balance"] = "time"
    values |= {f"train.{key}": getattr(train, key) for key in _TRAIN}
    if train.lr_decay_style != "constant":
        values["train.lr_decay_iters"] = train.lr_decay_iters or train.train_iters
    return values


def check_same_run(settings: Settings, saved: dict[str, Any], checkpoint: str) -> None:
    """Raise ConfigError, naming the settings, unless a checkpoint belongs to these settings.

    Args:
        settings: the present settings.
        saved: the identity that the checkpoint has; data.corpus may have been moved, and its contents are compared.
        checkpoint: its folder.
    """
    now = identity(settings)
    saved = saved | {"data.corpus": now["data.corpus"]}
    different = [key for key in now | saved if now.get(key) != saved.get(key)]
    if not different:
        return
    changes = [
        f"{_name(key, settings)} was {format_value(saved.get(key))} and is {format_value(now.get(key))}"
        for key in different
    ]
    decay = "train.lr_decay_iters"
    longer = f" (to train longer on the old schedule: {decay} = {saved[decay]})" if different == [decay] else ""
    raise ConfigError(
        f"{checkpoint} belongs to other settings: {'; '.join(changes)}; "
        f"resume with the old settings{longer}, or give another output.folder"
    )


def changed_settings(before: Mapping[str, Any], settings: Settings) -> list[str]:
    """Return the settings that differ from earlier ones, without the length of the run, files and display:
    'context_parallel_suite.algorithm was "ring" and is "direct"'.

    Args:
        before: sections of the earlier settings; empty: they are not known.
        settings: the present settings.
    """
    changes = []
    for name in ("model", "data", "context_parallel_suite", "train"):
        old = before.get(name)
        section = getattr(settings, name)
        now = section.model_dump()
        if not isinstance(old, dict):
            continue
        for key in section.key_names():
            value = now.get(key)
            old_value = old.get(key, value if key in type(section).model_fields else None)
            if old_value != value and key not in _LENGTH:
                changes.append(f"{name}.{key} was {format_value(old_value)} and is {format_value(value)}")
    return changes


def run_complete_note(files: RunFiles, settings: Settings) -> str:
    """Return the line that a run is complete, with the settings that continue it."""
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
