"""`algorithm: auto` in the settings of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.config import candidates as auto_module
from mindspeed_cp.config.candidates import resolve_auto
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from tests.train.test_training import tiny


def auto(corpus: Path, folder: Path, **changes: Any) -> Settings:
    suite = {"algorithm": "auto", "context_parallel_size": 4, "nodes": 2, "cluster": "a800", **changes}
    return tiny(corpus, folder, **{f"context_parallel_suite__{name}": value for name, value in suite.items()})


def test_the_choice_takes_the_place_of_auto_and_is_the_same_again(corpus: Path, tmp_path: Path) -> None:
    settings = auto(corpus, tmp_path)
    assert settings.plan_options["hidden_size"] == 48 and not settings.context_parallel_suite.uses_directional_groups
    chosen, decision = resolve_auto(settings)
    assert decision is not None
    suite = chosen.context_parallel_suite
    assert (suite.algorithm, suite.options) == (decision.candidate.algorithm, dict(decision.candidate.options))
    assert suite.cluster == "a800" and suite.nodes == 2 and chosen.train == settings.train
    assert resolve_auto(settings)[0] == chosen
    assert resolve_auto(chosen) == (chosen, None)


def test_the_linear_layers_are_those_of_the_model(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one tensor-parallel rank, with the model's widths: what attention can hide messages behind."""
    given: dict[str, Any] = {}
    real = auto_module.choose_algorithm

    def noted(*arguments: Any, **more: Any) -> Any:
        given.update(more, attention=arguments[2])
        return real(*arguments, **more)

    monkeypatch.setattr(auto_module, "choose_algorithm", noted)
    settings = auto(corpus, tmp_path).model_dump(exclude_unset=True)
    settings["train"] |= {"tensor_model_parallel_size": 2}
    settings["model"] |= {
        "ffn_hidden_size": 1000,
        "num_layers": 3,
        "window_size": [100, 0],
        "window_attn_skip_freq": 3,
    }  # two of three have it
    made = Settings(**settings)
    resolve_auto(made)
    model = made.model
    assert given["layer"] == LayerCost.from_sizes(
        model.hidden_size, model.mean_ffn_hidden_size, model.num_attention_heads, model.kv_heads, model.head_dim, model.head_dim_v,
        tensor_parallel=2, bytes_per_element=4,
    )  # fmt: skip
    assert given["attention"].heads == model.num_attention_heads // 2 and given["attention"].window == (100, 0)


def test_chosen_algorithm_runs_every_attention_of_the_model(corpus: Path, tmp_path: Path) -> None:
    """Heads over tensor-parallel ranks, dropout, windows."""
    settings = auto(corpus, tmp_path).model_dump(exclude_unset=True)
    settings["model"] |= {"attention_dropout": 0.1, "window_size": [100, 0]}
    settings["train"] |= {"tensor_model_parallel_size": 2}
    chosen, _ = resolve_auto(Settings(**settings))
    assert chosen.context_parallel_suite.algorithm != "auto" and chosen.model.attention_dropout == 0.1


def test_chosen_algorithm_keeps_the_token_bound(corpus: Path, tmp_path: Path) -> None:
    """Only hierarchical has one; what a row may hold at most is 517 tokens over 4 ranks and a few more."""
    chosen, decision = resolve_auto(auto(corpus, tmp_path, max_seqlen_per_dp_cp_rank=131))
    assert decision is not None
    assert {trial.candidate.algorithm for trial in decision.trials} == {"hierarchical"}
    assert chosen.context_parallel_suite.options["max_seqlen_per_dp_cp_rank"] == 131
    with pytest.raises(ConfigError, match="max_seqlen_per_dp_cp_rank = 100: is too little for rows"):
        auto(corpus, tmp_path, max_seqlen_per_dp_cp_rank=100)
    with pytest.raises(ConfigError, match="routing = true: must be left out with algorithm: auto"):
        auto(corpus, tmp_path, routing=True)
    alone, _ = resolve_auto(auto(corpus, tmp_path, context_parallel_size=1, nodes=1, max_seqlen_per_dp_cp_rank=517))
    assert alone.context_parallel_suite.algorithm == "ring"
