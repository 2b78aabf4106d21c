"""Settings that planned attention cannot honour are refused when they are read."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError
from mindspeed_cp.megatron import (
    attention_config,
    check_model_config,
    install,
    install_model,
    layer_attentions,
    rows_multiple,
)
from mindspeed_cp.megatron.patches import versions
from mindspeed_cp.ops.attention.backends import BACKENDS
from mindspeed_cp.plan import alibi_slopes
from mindspeed_cp.schema.unsupported import Unsupported, unsupported
from tests.megatron.gpt import Suite, build, layer_spec, transformer_config
from tests.megatron.models import EXPERTS, LATENT, LATENT_YARN
from tests.megatron.packed import plain_params

SUITE = Suite()


#: Values that rules refuse, where True is none.
REFUSED: dict[str, Any] = {
    "calculate_per_token_loss": False, "experimental_attention_variant": "dsa", "cuda_graph_impl": "local",
    "gtp_weight_remat_size": 2, "expert_gtp_weight_remat_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "rule", [rule for rule in unsupported("model") if not rule.when], ids=lambda rule: rule.setting
)
def test_a_transformer_setting_that_cannot_be_honoured_is_refused(rule: Unsupported) -> None:
    config, value = transformer_config(), REFUSED.get(rule.setting, True)
    if not hasattr(config, rule.setting):
        pytest.skip(f"TransformerConfig.{rule.setting} is missing: this Megatron-core does not have it")
    setattr(config, rule.setting, value)
    with pytest.raises(ConfigError) as error:
        check_model_config(config, SUITE)
    assert str(error.value).startswith(
        f"{rule.setting} is {value!r}; valid with planned attention: {rule.valid} ({rule.instead})"
    )


@pytest.mark.parametrize(
    ("setting", "value", "alternative"),
    [
        ("context_parallel_size", 2, "give both the same number"),
        ("cp_comm_type", "a2a", "leave cp_comm_type at its default"),
        ("cp_comm_type", ["p2p", "p2p"], "one algorithm|for all layers"),
    ],
)
def test_a_setting_that_contradicts_the_suite_is_refused(setting: str, value: Any, alternative: str) -> None:
    config = transformer_config()
    setattr(config, setting, value)
    with pytest.raises(ConfigError, match=f"^{setting} is .*{alternative}"):
        check_model_config(config, SUITE)


def test_depths_that_share_a_layer_would_drop_the_same_weights() -> None:
    rule = next(rule for rule in unsupported("model") if rule.setting == "mtp_use_repeated_layer")
    config = SimpleNamespace(mtp_use_repeated_layer=True, mtp_num_layers=2, attention_dropout=0.1)
    with pytest.raises(ConfigError, match=r"mtp_use_repeated_layer is True; valid .*False .*attention_dropout 0\.0"):
        rule.check(config)
    for changes in (dict(mtp_use_repeated_layer=False), dict(mtp_num_layers=1), dict(attention_dropout=0.0)):
        rule.check(SimpleNamespace(**{**vars(config), **changes}))


@pytest.mark.parametrize(
    ("model", "setting", "value", "alternative"),
    [
        (LATENT, "rotary_interleaved", True, "interleaved as they are"),
        (LATENT, "no_rope_freq", [0, 1], "in every layer"),
        (LATENT, "mrope_section", [1, 1, 2], "time, height and width"),
        (LATENT, "cache_mla_latents", True, "original spec"),
        (EXPERTS, "moe_token_dispatcher_type", "allgather", "'alltoall'"),
        (EXPERTS, "moe_expert_capacity_factor", 1.0, "its own count"),
        (EXPERTS, "moe_expert_rank_capacity_factor", 1.0, "its own count"),
        (EXPERTS, "moe_router_load_balancing_type", "sinkhorn", "'aux_loss'"),
        (EXPERTS, "moe_router_load_balancing_type", "quantile_balancing", "'aux_loss'"),
        (EXPERTS, "moe_router_load_balancing_type", ["aux_loss", "sinkhorn"], "'aux_loss'"),
    ],
)
def test_a_setting_that_depends_on_others_is_refused(
    model: dict[str, Any], setting: str, value: Any, alternative: str
) -> None:
    config = (
        transformer_config(cp=2, ep=2, **model) if "num_moe_experts" in model else transformer_config(cp=2, **model)
    )
    suite = Suite(context_parallel_size=2)
    check_model_config(config, suite)
    setattr(config, setting, value)
    with pytest.raises(ConfigError, match=alternative) as error:
        check_model_config(config, suite)
    assert str(error.value).startswith(f"{setting} is {value!r}")


def test_multi_token_prediction_needs_a_megatron_that_keeps_to_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformer_config(mtp_num_layers=1)
    monkeypatch.setattr("mindspeed_cp.megatron.adaptors.settings.IS_0_12", False)
    check_model_config(config, SUITE)
    monkeypatch.setattr("mindspeed_cp.megatron.adaptors.settings.IS_0_12", True)
    with pytest.raises(ConfigError, match=r"mtp_num_layers is 1; .*use megatron-core 0\.16\.1"):
        check_model_config(config, SUITE)


def test_experts_on_one_rank_may_do_what_depends_on_ranks() -> None:
    config = transformer_config(**{**EXPERTS, "moe_token_dispatcher_type": "allgather"}, moe_expert_capacity_factor=1.0)
    check_model_config(config, SUITE)


def test_a_norm_whose_gradient_megatron_would_count_twice_is_refused() -> None:
    check_model_config(transformer_config(tp=2, sequence_parallel=True, qk_layernorm=True, **LATENT), SUITE)
    check_model_config(transformer_config(tp=2, qk_layernorm=True, **{**LATENT, "q_lora_rank": None}), SUITE)
    with pytest.raises(ConfigError, match=r"qk_layernorm is True; .* or set sequence_parallel=True"):
        check_model_config(transformer_config(tp=2, qk_layernorm=True, **LATENT), SUITE)


def test_two_interleaved_stages_need_messages_of_their_own() -> None:
    stages = dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    more = dict(num_layers=4, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    check_model_config(transformer_config(**stages, **more, overlap_p2p_comm=True, batch_p2p_comm=False), SUITE)
    check_model_config(
        transformer_config(**{**stages, "pipeline_model_parallel_size": 4}, **{**more, "num_layers": 8}), SUITE
    )
    with pytest.raises(ConfigError, match=r"batch_p2p_comm is True; .*False, with overlap_p2p_comm True"):
        check_model_config(transformer_config(**stages, **more), SUITE)


def test_layers_that_differ_cannot_place_documents_by_their_work() -> None:
    balanced = Suite(algorithm="direct", layout="balanced")
    check_model_config(transformer_config(window_size=(8, 0)), balanced)
    config = transformer_config(window_size=(8, 0), window_attn_skip_freq=2)
    check_model_config(config, SUITE)
    with pytest.raises(ConfigError, match=r"window_attn_skip_freq is 2; valid .*'balanced': None.*use layout 'zigzag'"):
        check_model_config(config, balanced)
    with pytest.raises(ConfigError, match=r"window_attn_skip_freq is 2; valid .*'hierarchical': None.*use algorithm"):
        check_model_config(config, Suite(algorithm="hierarchical"))


def test_deterministic_mode_refuses_a_backend_that_is_not(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformer_config(deterministic_mode=True)
    check_model_config(config, Suite(backend="cpu"))
    monkeypatch.setattr(BACKENDS["cpu"], "deterministic", False)
    check_model_config(transformer_config(), Suite(backend="cpu"))
    refused = r"deterministic_mode is True, but the attention backend 'cpu' .*valid: False"
    with pytest.raises(ConfigError, match=refused):
        check_model_config(config, Suite(backend="cpu"))
    model = install_model(build(config, install(layer_spec(config), SUITE)))  # auto: known by the tensors' device only
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match=refused):
        model(tokens, torch.arange(4)[None], None, packed_seq_params=plain_params([4]))


def test_megatrons_word_for_the_ring_is_understood() -> None:
    check_model_config(transformer_config(cp_comm_type="p2p"), SUITE)
    check_model_config(transformer_config(), Suite(algorithm="p2p"))


def test_the_model_checks_its_settings_when_it_is_built(alone: None) -> None:
    config = transformer_config(log_max_attention_logit=True)
    with pytest.raises(ConfigError, match="log_max_attention_logit is True"):
        build(config, install(layer_spec(config), SUITE))


def test_the_group_must_have_the_size_of_the_settings(alone: None) -> None:
    config = transformer_config(cp=2)
    with pytest.raises(ConfigError, match="context_parallel_size is 2, but the context-parallel group has 1 ranks"):
        build(config, install(layer_spec(config), Suite(context_parallel_size=2)))


def test_auto_is_refused_because_the_training_resolves_it() -> None:
    with pytest.raises(ConfigError, match="algorithm is 'auto'"):
        check_model_config(transformer_config(), Suite(algorithm="auto"))


def test_attention_config_is_that_of_one_tensor_parallel_rank() -> None:
    config = transformer_config()
    assert attention_config(config) == AttentionConfig(heads=4, kv_heads=2, head_dim=8)
    assert attention_config(config, 2) == AttentionConfig(heads=2, kv_heads=1, head_dim=8)
    assert attention_config(config, 4) == AttentionConfig(heads=1, kv_heads=1, head_dim=8)
    assert attention_config(transformer_config(softmax_scale=0.5), mask="full").softmax_scale == 0.5
    with pytest.raises(ConfigError, match="num_attention_heads is 4; valid: a multiple of"):
        attention_config(config, 3)


def test_attention_config_of_a_tensor_parallel_rank_has_its_part_of_slopes_and_heads() -> None:
    config = transformer_config(num_attention_heads=6, num_query_groups=6, kv_channels=8, attention_dropout=0.1)
    whole = attention_config(config, alibi=True)
    assert np.array_equal(whole.slopes, alibi_slopes(6)) and (whole.first_head, whole.dropout) == (0, 0.1)
    parts = [attention_config(config, 3, rank, alibi=True) for rank in range(3)]
    assert [part.first_head for part in parts] == [0, 2, 4]
    assert np.array_equal(np.concatenate([part.slopes for part in parts]), alibi_slopes(6))
    config.attention_dropout = 0.0
    assert attention_config(config, 3, 2) == attention_config(config, 3, 0), "nothing depends on the rank"
    with pytest.raises(ConfigError, match="tensor_parallel_rank is 3; valid: 0 to 2"):
        attention_config(config, 3, 3, alibi=True)


def test_attention_config_of_latent_attention() -> None:
    config = transformer_config(**LATENT, mscale=0.0, mscale_all_dim=0.0)
    assert attention_config(config, 2) == AttentionConfig(
        heads=2, kv_heads=2, head_dim=13, head_dim_v=6, scale=13**-0.5, latent=(16, 4)
    )
    scaled = attention_config(transformer_config(**{**LATENT, **LATENT_YARN}))
    mscale = LATENT_YARN["mscale" if versions.IS_0_12 else "mscale_all_dim"]
    assert scaled.softmax_scale == pytest.approx((0.1 * mscale * math.log(4) + 1) ** 2 / math.sqrt(13))


@pytest.mark.parametrize(
    ("pattern", "windows"), [(None, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), (3, [1, 1, 0, 1]), ([0, 1, 1, 0], [0, 1, 1, 0])]
)
def test_layers_have_the_windows_of_megatrons_pattern(pattern: Any, windows: list[int]) -> None:
    config = transformer_config(num_layers=4, window_size=(7, 0), window_attn_skip_freq=pattern)
    layer_windows = [attention.window for attention in layer_attentions(config)]
    assert layer_windows == [(7, 0) if has else None for has in windows]
    if len(set(windows)) == 1:
        assert attention_config(config).window == (7, 0)
    else:
        with pytest.raises(ConfigError, match=r"so layers differ; .*layer_attentions"):
            attention_config(config)


def test_a_wrong_pattern_of_windows_is_refused() -> None:
    with pytest.raises(ConfigError, match="window_attn_skip_freq has 3 entries; valid: one for each of 2 layers"):
        layer_attentions(transformer_config(window_size=(7, 0), window_attn_skip_freq=[1, 0, 1]))
    with pytest.raises(ConfigError, match="window_attn_skip_freq is 0; valid: 1 or more"):
        layer_attentions(transformer_config(window_size=(7, 0), window_attn_skip_freq=0))


def test_rows_are_padded_only_under_sequence_parallelism() -> None:
    assert rows_multiple(transformer_config(tp=2)) == 1
    assert rows_multiple(transformer_config(tp=2, sequence_parallel=True)) == 2


@pytest.mark.parametrize(
    ("precision", "rows"),
    [
        (dict(fp8="hybrid", fp8_recipe="delayed"), 16),
        (dict(fp8="e4m3", fp8_recipe="blockwise"), 16),
        (dict(fp8="e4m3", fp8_recipe="mxfp8"), 32),
        (dict(fp4="e2m1", fp4_recipe="nvfp4"), 32),
    ],
)
@pytest.mark.parametrize("parallel", [dict(tp=1), dict(tp=2), dict(tp=2, sequence_parallel=True)])
def test_rows_are_padded_to_the_blocks_of_a_lower_precision(
    precision: dict[str, Any], rows: int, parallel: dict[str, Any]
) -> None:
    config = transformer_config(**parallel)
    for name, value in precision.items():  # set behind the checks of Transformer Engine
        setattr(config, name, value)
    assert rows_multiple(config) == rows * (2 if "sequence_parallel" in parallel else 1)
