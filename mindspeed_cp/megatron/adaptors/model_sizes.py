"""Sizes of a Megatron model by which plans are chosen: those of the launch, not of a plain layer."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp.algorithms import algorithm_options
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.plan import AttentionConfig


def with_model_sizes(suite: SuiteSettings, config: TransformerConfig) -> SuiteSettings:
    """Return the settings with the sizes of the model as options, where the algorithm costs linear layers and they are
    not given."""
    sizes = {
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": _mean_ffn_hidden_size(config),
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "sequence_parallel": bool(config.sequence_parallel),
    }
    known = algorithm_options(suite.algorithm)
    return suite.model_copy(update={name: size for name, size in sizes.items() if name in known} | suite.options)


def model_layer_cost(config: TransformerConfig, attention: AttentionConfig) -> LayerCost:
    """Return the cost of the linear part of a layer on one tensor-parallel rank, whose attention is `attention`."""
    tensor = config.tensor_model_parallel_size
    return LayerCost.from_sizes(
        config.hidden_size,
        _mean_ffn_hidden_size(config),
        attention.heads * tensor,
        attention.kv_heads * tensor,
        attention.head_dim,
        attention.head_dim_v,
        tensor_parallel=tensor,
        sequence_parallel=bool(config.sequence_parallel),
        bytes_per_element=2 if config.bf16 or config.fp16 else 4,
    )


def launch_settings(config: TransformerConfig) -> dict[str, Any]:
    """Return the settings, by their keys, by which `mindspeed-cp simulate` models what a launch trains."""
    settings = {
        "model.num_layers": config.num_layers,
        "model.hidden_size": config.hidden_size,
        "model.ffn_hidden_size": _mean_ffn_hidden_size(config),
        "model.num_attention_heads": config.num_attention_heads,
    }
    if config.multi_latent_attention:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        given = {f"model.{name}": getattr(config, name) for name in names if getattr(config, name) is not None}
        settings |= {"model.multi_latent_attention": "true", "model.kv_channels": "null", **given}
        settings["model.num_query_groups"] = config.num_attention_heads
    else:
        settings["model.num_query_groups"] = config.num_query_groups or config.num_attention_heads
        settings["model.kv_channels"] = config.kv_channels or config.hidden_size // config.num_attention_heads
    settings["train.bf16"] = "true" if config.bf16 or config.fp16 else "false"
    settings["train.tensor_model_parallel_size"] = config.tensor_model_parallel_size
    if config.sequence_parallel:
        settings["train.sequence_parallel"] = "true"
    return settings


def _mean_ffn_hidden_size(config: TransformerConfig) -> int:
    """Return the width of a gated MLP with the mean work per token of the layers, the experts of a token included."""
    layers, dense = config.num_layers, config.ffn_hidden_size or 4 * config.hidden_size
    experts = 0
    if config.num_moe_experts:
        pattern = config.moe_layer_freq
        experts = sum(pattern) if isinstance(pattern, list) else len(range(0, layers, pattern))
    routed = config.moe_router_topk * (config.moe_ffn_hidden_size or dense)
    visited = routed + (config.moe_shared_expert_intermediate_size or 0)
    matrices = 3 if config.gated_linear_unit else 2
    return max(1, round((dense * (layers - experts) + visited * experts) / layers * matrices / 3))
