"""Settings that identify a run: a checkpoint can be resumed only with equal ones.

They are those that change the numbers: model, data, order, schedule. How the work is split over ranks, recomputed,
prefetched or shown changes only rounding, so a run may be resumed with other ranks. The rates of the optimizer may
change on resume, as a run whose loss diverges needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.messages import format_value

_TRAIN = ("global_batch_size", "lr_decay_style", "lr_warmup_iters", "bf16", "seed")


def identity(settings: Settings) -> dict[str, Any]:
    """Return the settings that identify a run, by dotted key, with defaults that depend on others filled in."""
    model, data, train = settings.model, settings.data, settings.train
    filled = {
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.resolved_ffn_hidden_size,
    }
    values = flat_settings({"model": {**model.model_dump(), **filled}, "data": data.model_dump()})
    del values["model.recompute_granularity"]
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
    old, new = saved | {"data.corpus": settings.data.corpus}, identity(settings)
    changes = {
        key: f"{key} was {format_value(old.get(key))} and is {format_value(new.get(key))}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    }
    if not changes:
        return
    decay = "train.lr_decay_iters"
    longer = f" (to train longer on the old schedule: {decay} = {saved[decay]})" if [*changes] == [decay] else ""
    raise ConfigError(
        f"{checkpoint} belongs to other settings: {'; '.join(changes.values())}; "
        f"resume with the old settings{longer}, or give another output.folder"
    )


def flat_settings(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of all sections by dotted key."""
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
