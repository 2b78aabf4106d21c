"""Settings of the model and of its splitting: what does not go together is one line when the settings are read."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_cp.config.rules import data_parallel_size
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError

LATENT: dict[str, Any] = {"multi_latent_attention": True}
EXPERTS: dict[str, Any] = {"num_moe_experts": 4}


def error(**sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Settings(**sections)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"window_size": [3]}, "model.window_size = [3]: must be [left, 0]"),
        ({"window_size": []}, "model.window_size = []: must be [left, 0]"),
        ({"window_size": [3, True]}, "model.window_size.1 = true: must be a list of integers or null"),
        ({"window_size": [3, 1]}, "a GPT does not see tokens to the right"),
        ({"window_size": [-2, 0]}, "left >= 0 tokens, -1 for no limit"),
        ({"window_attn_skip_freq": 2}, "model.window_attn_skip_freq = 2: has an effect only with window_size"),
        (
            {"window_size": [3, 0], "window_attn_skip_freq": 0},
            "must be an integer >= 1 and <= 1e9 or a list of integers",
        ),
        (
            {"window_size": [3, 0], "window_attn_skip_freq": [1, 2, 0, 0]},
            "one entry, 0 or 1, for each of num_layers = 4 layers",
        ),
        ({"window_size": [3, 0], "window_attn_skip_freq": [1, 0]}, "for each of num_layers = 4 layers: [1, 0, ...]"),
        ({"softmax_type": "sink"}, "one of vanilla, off-by-one, learnable"),
        ({"attention_dropout": 1.0}, "model.attention_dropout = 1.0: must be a number >= 0 and < 1"),
        ({"position_embedding_type": "alibis"}, "one of rope, alibi, none"),
        ({"q_lora_rank": 8}, "model.q_lora_rank = 8: has an effect only with multi_latent_attention: true"),
        ({**LATENT, "position_embedding_type": "alibi"}, "must be rope with multi_latent_attention"),
        ({**LATENT, "kv_channels": 8}, "give qk_head_dim, qk_pos_emb_head_dim and v_head_dim"),
        ({**LATENT, "num_query_groups": 2}, "must be null with multi_latent_attention"),
        ({**LATENT, "qk_pos_emb_head_dim": 7}, "model.qk_pos_emb_head_dim = 7: must be even"),
        ({"moe_router_topk": 1}, "has an effect only with num_moe_experts"),
        ({**EXPERTS, "moe_router_topk": 5}, "must be at most num_moe_experts = 4"),
        ({**EXPERTS, "moe_router_topk": 1}, "needs moe_router_pre_softmax: true"),
        ({**EXPERTS, "moe_layer_freq": [1]}, "one entry, 0 or 1, for each of num_layers = 4"),
        ({**EXPERTS, "add_bias_linear": True}, "experts have no biases"),
    ],
)
def test_contradicting_model_settings_are_one_line(model: dict[str, Any], expected: str) -> None:
    assert expected in error(model=model)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"train": {"sequence_parallel": True}},
            "train.sequence_parallel = true: needs tensor_model_parallel_size > 1",
        ),
        ({"train": {"expert_model_parallel_size": 2}}, "train.expert_model_parallel_size = 2: needs experts"),
        (
            {"model": EXPERTS, "train": {"expert_model_parallel_size": 3}},
            "must divide model.num_moe_experts = 4; valid: 1, 2, 4",
        ),
        (
            {"model": EXPERTS, "train": {"tensor_model_parallel_size": 2}},
            "train.sequence_parallel = false: must be true with experts",
        ),
        (
            {
                "model": {**EXPERTS, "moe_shared_expert_intermediate_size": 7},
                "train": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            },
            "train.tensor_model_parallel_size = 2: must divide model.moe_shared_expert_intermediate_size = 7",
        ),
        (
            {"model": {**LATENT, "q_lora_rank": 7}, "train": {"tensor_model_parallel_size": 2}},
            "must divide model.q_lora_rank = 7",
        ),
        (
            {"model": {**LATENT, "q_lora_rank": 8, "qk_layernorm": True}, "train": {"tensor_model_parallel_size": 2}},
            "model.qk_layernorm = true: must be false with model.q_lora_rank",
        ),
        (
            {
                "model": {"window_size": [3, 0], "window_attn_skip_freq": 2},
                "context_parallel_suite": {"layout": "balanced"},
            },
            'context_parallel_suite.layout = "balanced": places documents by the work of a layer',
        ),
        (
            {
                "model": {"window_size": [3, 0], "window_attn_skip_freq": 2},
                "context_parallel_suite": {"algorithm": "hierarchical"},
            },
            'context_parallel_suite.algorithm = "hierarchical": places documents by the work of a layer',
        ),
    ],
)
def test_contradicting_sections_are_one_line(sections: dict[str, dict[str, Any]], expected: str) -> None:
    assert expected in error(**sections)


def test_experts_are_on_equally_many_ranks() -> None:
    settings = Settings(model=EXPERTS, train={"expert_model_parallel_size": 4})  # type: ignore[arg-type]
    assert data_parallel_size(settings, 4) == 4
    with pytest.raises(
        ConfigError, match=r"^2 ranks do not fit train\.expert_model_parallel_size = 4.* multiple of 4$"
    ):
        data_parallel_size(settings, 2)


def test_valid_model_settings_are_accepted() -> None:
    model = {**LATENT, **EXPERTS, "hidden_size": 100, "window_size": [5, 0], "window_attn_skip_freq": [1, 0, 1, 1]}
    settings = Settings(model=model)  # type: ignore[arg-type]
    assert Settings.model_validate_json(settings.model_dump_json()) == settings
    section = settings.model
    assert (section.head_dim, section.head_dim_v, section.rotary_dim) == (192, 128, 64)
    assert (section.expert_layers, section.window_layers, section.resolved_moe_ffn_hidden_size) == (
        4,
        3,
        section.resolved_ffn_hidden_size,
    )
    for layers, pattern, count in ((4, 2, 2), (5, 2, 3), (4, 9, 1), (3, [0, 1, 1], 2)):
        changed = Settings(model={**EXPERTS, "num_layers": layers, "moe_layer_freq": pattern}).model  # type: ignore[arg-type]
        assert changed.expert_layers == count
    for pattern, count in ((None, 4), (2, 2), (5, 4), (1, 0)):
        changed = Settings(model={"window_size": [5, 0], "window_attn_skip_freq": pattern}).model  # type: ignore[arg-type]
        assert changed.window_layers == count
