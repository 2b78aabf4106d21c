"""What plans are built and chosen by: the attention of each layer of a Megatron model on one tensor-parallel rank, and
the sizes of its linear layers.
"""

from __future__ import annotations

import math
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.common.embeddings import _yarn_get_mscale
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp import ConfigError
from mindspeed_cp.algorithms import algorithm_options
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.megatron.mindspeed_compat import replaced_by
from mindspeed_cp.megatron.patches import versions
from mindspeed_cp.plan import AttentionConfig, alibi_slopes

_LATENT_INIT = "megatron.core.transformer.multi_latent_attention.MultiLatentAttention.__init__"


def attention_config(
    config: TransformerConfig,
    tensor_parallel_size: int | None = None,
    tensor_parallel_rank: int | None = None,
    *,
    layer_number: int | None = None,
    mask: str = "causal",
    alibi: bool = False,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    scale: float | None = None,
    dropout: float | None = None,
) -> AttentionConfig:
    """Return the attention of a layer of a Megatron model on one tensor-parallel rank.

    Args:
        config: the model's settings.
        tensor_parallel_size: ranks that share the heads; default: config.tensor_model_parallel_size.
        tensor_parallel_rank: number among them; default: that of this process if Megatron is initialized, else 0. Only
            ALiBi and dropout depend on it.
        layer_number: 1-based, over all pipeline stages; may be left out where all layers compute the same.
        mask: "causal" or "full".
        alibi: linear biases, with the slopes of all the model's heads, of which this rank has its part.
        head_dim, head_dim_v: width of q and k, and of v; default: what the settings say, for multi-latent attention
            qk_head_dim + qk_pos_emb_head_dim and v_head_dim.
        scale: factor of q.k; default: that of the settings.
        dropout: default: config.attention_dropout.

    Raises:
        ConfigError: the heads cannot be shared by that many ranks, or layers differ and none was named.
    """
    tp = config.tensor_model_parallel_size if tensor_parallel_size is None else tensor_parallel_size
    heads, kv_heads = _heads(config, tp)
    width, width_v, factor = _widths(config)
    rate = config.attention_dropout if dropout is None else dropout
    first = _rank(tensor_parallel_rank, tp) * heads if alibi or rate else 0
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or width,
        head_dim_v=head_dim_v or (head_dim if head_dim and not config.multi_latent_attention else width_v),
        mask=mask,
        window=_window(config, layer_number),
        alibi=tuple(alibi_slopes(config.num_attention_heads)[first : first + heads].tolist()) if alibi else False,
        dropout=rate,
        scale=factor if scale is None else scale,
        first_head=first if rate else 0,
        latent=_latent(config),
    )


def layer_attentions(
    config: TransformerConfig,
    tensor_parallel_size: int | None = None,
    tensor_parallel_rank: int | None = None,
    *,
    alibi: bool = False,
) -> tuple[AttentionConfig, ...]:
    """Return :func:`attention_config` of every layer, then of the layers of multi-token prediction; a micro-batch needs
    a plan for each that differs::

    plans = [build_plan(documents, topology, attention) for attention in dict.fromkeys(layer_attentions(config))]
    batch, params = planned_batch(whole, plans, rank)
    """
    return tuple(
        attention_config(config, tensor_parallel_size, tensor_parallel_rank, layer_number=number, alibi=alibi)
        for number in range(1, config.num_layers + (config.mtp_num_layers or 0) + 1)
    )


def computes_the_same(a: AttentionConfig, b: AttentionConfig) -> bool:
    """Return True if two attentions are equal, with default scale and slopes written out; the first head counts only
    with dropout."""
    if not math.isclose(a.softmax_scale, b.softmax_scale) or (a.alibi is False) != (b.alibi is False):
        return False
    if a.slopes is not None and b.slopes is not None and a.slopes.tolist() != b.slopes.tolist():
        return False
    names = ["heads", "kv_heads", "head_dim", "head_dim_v", "mask", "window", "dropout"]
    return all(getattr(a, name) == getattr(b, name) for name in names + ["first_head"] * (a.dropout > 0))


def _heads(config: TransformerConfig, tp: int) -> tuple[int, int]:
    """Return the query and kv heads of one tensor-parallel rank."""
    if config.num_attention_heads % tp:
        raise ConfigError(
            f"num_attention_heads is {config.num_attention_heads}; valid: a multiple of tensor_model_parallel_size, "
            f"which is {tp}"
        )
    heads = config.num_attention_heads // tp
    if config.multi_latent_attention:  # every head has keys and values of its own once they are unfolded
        return heads, heads
    groups = config.num_query_groups or config.num_attention_heads
    if groups % tp and tp % groups:
        raise ConfigError(
            f"num_query_groups is {groups}; valid: a multiple or a divisor of tensor_model_parallel_size, which is {tp}"
        )
    return heads, max(1, groups // tp)


def _widths(config: TransformerConfig) -> tuple[int, int, float | None]:
    """Return width of q and k, width of v, factor of q.k."""
    if not config.multi_latent_attention:
        width = config.kv_channels or config.hidden_size // config.num_attention_heads
        return width, width, config.softmax_scale
    width = config.qk_head_dim + config.qk_pos_emb_head_dim
    # MindSpeed's layers scale by mscale in every version.
    mscale = config.mscale if replaced_by(_LATENT_INIT) else versions.latent_factor_of_scale(config)
    concentration = _yarn_get_mscale(config.rotary_scaling_factor, mscale)  # as Megatron, RoPE or YaRN
    return width, config.v_head_dim, concentration * concentration / math.sqrt(width)


def _latent(config: TransformerConfig) -> tuple[int, int] | None:
    """Return (channels of the latent, channels of k that all heads share) if plans may let latents travel; None where
    Megatron recomputes the up-projection by itself, computes it in fp8 or fp4, or is replaced by MindSpeed."""
    if not config.multi_latent_attention or replaced_by(_LATENT_INIT):
        return None
    selective = config.recompute_granularity == "selective"
    if selective and "mla_up_proj" in (getattr(config, "recompute_modules", None) or ()):
        return None
    if config.fp8 or getattr(config, "fp4", None):
        return None
    return config.kv_lora_rank, config.qk_pos_emb_head_dim


def _window(config: TransformerConfig, layer_number: int | None) -> tuple[int, int] | None:
    """Return the sliding window of a layer; None if window_attn_skip_freq makes it a layer of full attention."""
    pattern = getattr(config, "window_attn_skip_freq", None)  # Megatron 0.12 has none
    window, layers = config.window_size, config.num_layers
    if window is None or pattern is None:
        return None if window is None else tuple(window)
    if isinstance(pattern, list) and len(pattern) != layers:
        raise ConfigError(f"window_attn_skip_freq has {len(pattern)} entries; valid: one for each of {layers} layers")
    if isinstance(pattern, int) and pattern < 1:
        raise ConfigError(f"window_attn_skip_freq is {pattern}; valid: 1 or more, or a list of 0 and 1")
    later = getattr(config, "mtp_num_layers", None) or 0  # of multi-token prediction
    if isinstance(pattern, list) and later:
        raise ConfigError(
            f"window_attn_skip_freq is {pattern}, without entries for the {later} layers of multi-token prediction, as "
            "Megatron has no place for them; valid with mtp_num_layers: an integer, or None"
        )
    numbers = range(1, layers + later + 1)
    has = [bool(p) for p in pattern] if isinstance(pattern, list) else [n % pattern != 0 for n in numbers]
    if layer_number is None:
        if len(set(has)) > 1:
            raise ConfigError(
                f"window_attn_skip_freq is {pattern}, so layers differ; name one (layer_number), or build a plan for "
                "each of mindspeed_cp.megatron.layer_attentions(config)"
            )
        layer_number = 1
    return tuple(window) if has[layer_number - 1] else None


def _rank(given: int | None, tp: int) -> int:
    if given is None:
        ready = tp > 1 and parallel_state.model_parallel_is_initialized()
        given = parallel_state.get_tensor_model_parallel_rank() if ready else 0
    if not 0 <= given < tp:
        raise ConfigError(f"tensor_parallel_rank is {given}; valid: 0 to {tp - 1}")
    return given


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
