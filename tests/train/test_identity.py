"""Which settings bind a checkpoint to a run, and which may change when it is resumed."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.checks import check_same_run, identity


def changed(**sections: dict[str, Any]) -> Settings:
    return Settings(**sections)  # type: ignore[arg-type]


def test_settings_that_change_numbers_bind_a_checkpoint() -> None:
    saved = identity(Settings())
    check_same_run(Settings(), saved, "iter_1")
    with pytest.raises(
        ConfigError, match=r"model\.hidden_size was 256 and is 128; .*train\.seed was 1234 and is 1"
    ) as caught:
        check_same_run(changed(model={"hidden_size": 128}, train={"seed": 1}), saved, "iter_1")
    assert str(caught.value).startswith("iter_1 belongs to other settings: ")
    with pytest.raises(ConfigError, match=r"train\.lr_decay_iters was 100 and is 200"):
        check_same_run(changed(train={"train_iters": 200}), saved, "iter_1")


def test_the_balance_binds_a_checkpoint_where_weights_are_dropped() -> None:
    """What is dropped depends on rows; without dropout documents may be laid otherwise at any time."""
    by_time = {"balance": "time"}
    check_same_run(changed(data=by_time), identity(Settings()), "iter_1")
    check_same_run(Settings(), identity(changed(data=by_time)), "iter_1")
    dropping: dict[str, Any] = {"model": {"attention_dropout": 0.1}}
    saved = identity(changed(**dropping))
    check_same_run(changed(**dropping), saved, "iter_1")
    with pytest.raises(ConfigError, match=r'data\.balance was "none" and is "time"'):
        check_same_run(changed(**dropping, data=by_time), saved, "iter_1")


def test_settings_that_change_rounding_alone_may_change() -> None:
    saved = identity(Settings())
    other = changed(
        model={"recompute_granularity": "full", "num_query_groups": 8, "kv_channels": 32},
        train={"tensor_model_parallel_size": 2, "train_iters": 300, "lr_decay_iters": 100},
        checkpoint={"save_interval": 3},
        output={"folder": "elsewhere"},
        context_parallel_suite={"context_parallel_size": 4, "verify_plans": True},
    )
    check_same_run(other, saved, "iter_1")
    constant = identity(changed(train={"lr_decay_style": "constant"}))
    check_same_run(changed(train={"lr_decay_style": "constant", "train_iters": 300}), constant, "iter_1")
