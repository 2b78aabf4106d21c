"""Settings that planned attention cannot honour are refused when they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindspeed_cp import AttentionConfig, ConfigError
from mindspeed_cp.megatron import attention_config, check_model_config, check_suite, install, rows_multiple
from tests.megatron.gpt import Suite, build, layer_spec, transformer_config

SUITE = Suite()


@pytest.mark.parametrize(
    ("setting", "value", "alternative"),
    [
        ("calculate_per_token_loss", False, "valid with planned attention: True"),
        ("attention_dropout", 0.1, "use hidden_dropout"),
        ("window_size", (128, 0), "valid with planned attention: None"),
        ("softmax_type", "off-by-one", "'vanilla'"),
        ("qk_clip", True, "qk_layernorm"),
        ("log_max_attention_logit", True, "False"),
        ("multi_latent_attention", True, "grouped-query"),
        ("experimental_attention_variant", "dsa", "softmax attention"),
        ("is_hybrid_model", True, "state-space"),
        ("mtp_num_layers", 1, "multi-token prediction"),
        ("mrope_section", [1, 1, 2], "'rope'"),
        ("apply_rope_fusion", True, "rotary positions come from the plan"),
        ("fused_single_qkv_rope", True, "rotary positions come from the plan"),
        ("hybrid_context_parallel", True, "a plan already gives each document"),
        ("fp8_dot_product_attention", True, "dtype"),
        ("use_kitchen_attention", True, "backend"),
        ("enable_cuda_graph", True, "own plan"),
        ("cuda_graph_impl", "local", "own plan"),
        ("flash_decode", True, "original spec"),
        ("context_parallel_size", 2, "give both the same number"),
        ("cp_comm_type", "a2a", "leave cp_comm_type at None"),
        ("cp_comm_type", ["p2p", "p2p"], "one algorithm|for all layers"),
    ],
)
def test_a_transformer_setting_that_cannot_be_honoured_is_refused(setting: str, value: Any, alternative: str) -> None:
    config = transformer_config()
    if not hasattr(config, setting):
        pytest.skip(f"this Megatron-core has no {setting}")
    setattr(config, setting, value)
    with pytest.raises(ConfigError, match=alternative) as error:
        check_model_config(config, SUITE)
    assert str(error.value).startswith(f"{setting} is {value!r}")


def test_megatrons_word_for_the_ring_is_understood() -> None:
    check_model_config(transformer_config(cp_comm_type="p2p"), SUITE)
    check_model_config(transformer_config(), replace(SUITE, algorithm="p2p"))


def test_the_model_checks_its_settings_when_it_is_built(alone: None) -> None:
    config = transformer_config(attention_dropout=0.1)
    with pytest.raises(ConfigError, match=r"attention_dropout is 0\.1"):
        build(config, install(layer_spec(config), SUITE))


def test_the_group_must_have_the_size_of_the_settings(alone: None) -> None:
    config = transformer_config(cp=2)
    with pytest.raises(ConfigError, match="context_parallel_size is 2, but the context-parallel group has 1 ranks"):
        build(config, install(layer_spec(config), Suite(context_parallel_size=2)))


@pytest.mark.parametrize(
    ("setting", "value", "valid"),
    [
        ("algorithm", "magic", "valid in this version: ring"),
        ("backend", "tpu", "valid: auto, cpu"),
        ("timeout_seconds", 0.0, "valid: seconds above 0"),
        ("timeout_seconds", float("nan"), "valid: seconds above 0"),
        ("context_parallel_size", 0, "valid: 1 or more"),
    ],
)
def test_a_wrong_setting_of_the_suite_is_refused(setting: str, value: Any, valid: str) -> None:
    wrong = replace(SUITE, **{setting: value})
    with pytest.raises(ConfigError, match=valid) as error:
        check_suite(wrong)
    assert str(error.value).startswith(f"context_parallel_suite.{setting} is {value!r}")
    with pytest.raises(ConfigError):
        install(layer_spec(transformer_config()), wrong)


def test_attention_config_is_that_of_one_tensor_parallel_rank() -> None:
    config = transformer_config()
    assert attention_config(config) == AttentionConfig(heads=4, kv_heads=2, head_dim=8)
    assert attention_config(config, 2) == AttentionConfig(heads=2, kv_heads=1, head_dim=8)
    assert attention_config(config, 4) == AttentionConfig(heads=1, kv_heads=1, head_dim=8)
    assert attention_config(transformer_config(softmax_scale=0.5), mask="full").softmax_scale == 0.5
    with pytest.raises(ConfigError, match="num_attention_heads is 4; valid: a multiple of"):
        attention_config(config, 3)


def test_rows_are_padded_only_under_sequence_parallelism() -> None:
    assert rows_multiple(transformer_config(tp=2)) == 1
    assert rows_multiple(transformer_config(tp=2, sequence_parallel=True)) == 2
