"""Which settings make a run what it is: a checkpoint may only go on under equal ones.

Everything that changes the numbers counts: model, data, order, optimizer, schedule.  How the work is split over ranks,
recomputed, prefetched or shown does not (beyond rounding), so a run may go on with other ranks.
"""

from __future__ import annotations

from typing import Any

from mindspeed_cp.config import Settings
from mindspeed_cp.config_errors import show
from mindspeed_cp.errors import ConfigError

_NOT_MODEL = {"recompute_granularity"}
_TRAIN = (
    *("global_batch_size", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "bf16", "seed", "use_distributed_optimizer"),
)


def identity(settings: Settings) -> dict[str, Any]:
    """The settings that a checkpoint is bound to, by dotted key, with defaults that depend on others filled in."""
    model, data, train = settings.model, settings.data, settings.train
    filled = {"num_query_groups": model.kv_heads, "kv_channels": model.head_dim, "ffn_hidden_size": model.ffn_size}
    found: dict[str, Any] = {
        f"model.{key}": filled.get(key, value) for key, value in model.model_dump().items() if key not in _NOT_MODEL
    }
    found |= {f"data.{key}": value for key, value in data.model_dump().items()}
    found |= {f"train.{key}": getattr(train, key) for key in _TRAIN}
    if train.lr_decay_style != "constant":
        found["train.lr_decay_iters"] = train.lr_decay_iters or train.train_iters
    return found


def check_same_run(settings: Settings, saved: dict[str, Any], checkpoint: str) -> None:
    """Raise ConfigError, naming the settings, unless a checkpoint belongs to these settings."""
    now = identity(settings)
    # An older version that did not know a setting of the model had no other value than the default.
    saved = {key: value for key, value in identity(Settings()).items() if key.startswith("model.")} | saved
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


def _name(key: str, settings: Settings) -> str:
    if key == "train.lr_decay_iters" and settings.train.lr_decay_iters is None:
        return "train.lr_decay_iters (null: train.train_iters)"
    return key
