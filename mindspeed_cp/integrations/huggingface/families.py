"""The attention of each layer of a Hugging Face model, read from its configuration: the third input of build_plan.

A configuration says in different ways what its layers compute, and each family of models has switches of its own. Only
families that are tested against the documents one by one are read; others are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.schema.messages import closest_names

#: Name of planned attention among transformers' attention implementations.
IMPLEMENTATION = "mindspeed_cp"

_NO_CAP = "caps the scores, which planned attention does not do"
_BOTH_WAYS = "lets tokens see later ones, by a mask of the model's own"
_NOT_HANDED_ON = "gives layers a window that they do not hand on to their attention implementation"


@dataclass(frozen=True)
class Family:
    """How the configuration of a family of models is read.

    Attributes:
        mask: "causal" or "full".
        window: function of (configuration, layer) that returns how many tokens a query sees on a side, itself included;
            None: all.
        scale: function of (configuration, layer, channels of q and k) that returns the factor of the scores.
        dropout: name of the setting with the dropout rate of attention weights; None: the layers have none.
        widths: function of the layer's configuration that returns the channels of q and k, and of v; None: `head_dim`.
        latent: function of the configuration that returns the channels of the latent, and of the keys that all heads
            share; None: the model has none.
        refused: settings with their only valid value and why others do not work; a model without one is valid.
        has_sinks: True if the layers have attention sinks, which they pass as `s_aux`.
        has_alpha: True if rotary positions of type `dynamic` with an `alpha` have fixed frequencies.
    """

    mask: str = "causal"
    window: Callable[[Any, int], int | None] = lambda config, layer: None
    scale: Callable[[Any, int, int], float] = lambda config, layer, width: width**-0.5
    dropout: str | None = "attention_dropout"
    widths: Callable[[Any], tuple[int, int]] | None = None
    latent: Callable[[Any], tuple[int, int]] | None = None
    refused: tuple[tuple[str, Any, str], ...] = ()
    has_sinks: bool = False
    has_alpha: bool = False


def _layer_window(config: Any, layer: int) -> int | None:
    """Return the window of a layer whose kind is in layer_types."""
    return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None


def _config_window(config: Any, layer: int) -> int | None:
    """Return the window of models whose layers all have the same."""
    return config.sliding_window


def _qwen_moe_window(config: Any, layer: int) -> int | None:
    """Return the window of models in which a switch gives it to all layers."""
    return config.sliding_window if getattr(config, "use_sliding_window", False) else None


def _gpt2_scale(config: Any, layer: int, width: int) -> float:
    scale = width**-0.5 if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


def _latent_scale(config: Any, layer: int, width: int) -> float:
    """Return the scale of multi-head latent attention, with the concentration of YaRN (2309.00071) if it is on."""
    rope = getattr(config, "rope_parameters", None) or {}
    all_dims, factor = rope.get("mscale_all_dim", 0), rope.get("factor", 1.0)
    if rope.get("rope_type", "default") == "default" or not all_dims or factor <= 1:
        return width**-0.5
    return width**-0.5 * (0.1 * all_dims * math.log(factor) + 1.0) ** 2


_DECODER = (("is_causal", True, _BOTH_WAYS),)
_TEXT = (*_DECODER, ("use_bidirectional_attention", None, _BOTH_WAYS))
_PLAIN = Family(refused=_DECODER)
_WINDOW = Family(window=_config_window, refused=_DECODER)
_LAYER_WINDOW = Family(window=_layer_window, refused=_DECODER)
_ALPHA = Family(refused=_DECODER, has_alpha=True)
_ERNIE = Family(dropout=None, refused=_DECODER)
_GRANITE = Family(scale=lambda config, layer, width: config.attention_multiplier, refused=_DECODER)
_GEMMA = Family(
    window=_layer_window,
    scale=lambda config, layer, width: config.query_pre_attn_scalar**-0.5,
    refused=(*_TEXT, ("attn_logit_softcapping", None, _NO_CAP)),
)
_LATENT = Family(
    scale=_latent_scale,
    widths=lambda config: (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim),
    latent=lambda config: (config.kv_lora_rank, config.qk_rope_head_dim),
    refused=_DECODER,
)

#: Families by the model_type of their configuration.
FAMILIES: dict[str, Family] = {
    "llama": _PLAIN,
    "mistral": _WINDOW,
    "mixtral": _WINDOW,
    "qwen2": _LAYER_WINDOW,
    "qwen3": _LAYER_WINDOW,
    "qwen2_moe": Family(refused=(*_DECODER, ("use_sliding_window", False, _NOT_HANDED_ON))),
    "qwen3_moe": Family(window=_qwen_moe_window, refused=_DECODER),
    "gpt_oss": Family(window=_layer_window, refused=_DECODER, has_sinks=True),
    "gemma": Family(refused=_TEXT),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": Family(window=_layer_window, scale=lambda config, layer, width: 1.0, refused=_DECODER),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "glm": _PLAIN,
    "glm4": _PLAIN,
    "glm4_moe": _PLAIN,
    "phi": _PLAIN,
    "phi3": _WINDOW,
    "olmo": _PLAIN,
    "olmo2": _PLAIN,
    "olmo3": _LAYER_WINDOW,
    "olmoe": _PLAIN,
    "smollm3": _LAYER_WINDOW,
    "ministral": _LAYER_WINDOW,
    "ministral3": _WINDOW,
    "cohere": _PLAIN,
    "cohere2": _LAYER_WINDOW,
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "seed_oss": _PLAIN,
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": _ERNIE,
    "minimax_m2": _PLAIN,
    "hunyuan_v1_dense": _ALPHA,
    "hunyuan_v1_moe": _ALPHA,
    "dots1": _LAYER_WINDOW,
    "exaone4": _LAYER_WINDOW,
    "exaone_moe": _LAYER_WINDOW,
    "hy_v3": _PLAIN,
    "solar_open": _PLAIN,
    "starcoder2": _WINDOW,
    "gpt_neox": _PLAIN,
    "apertus": _PLAIN,
    "arcee": _PLAIN,
    "helium": _PLAIN,
    "cwm": _LAYER_WINDOW,
    "afmoe": _LAYER_WINDOW,
    "qwen2_vl_text": _LAYER_WINDOW,
    "qwen2_5_vl_text": _LAYER_WINDOW,
    "qwen3_vl_text": _PLAIN,
    "qwen3_vl_moe_text": _PLAIN,
    "gpt2": Family(
        scale=_gpt2_scale,
        dropout="attn_pdrop",
        refused=(("add_cross_attention", False, "attends to another model's states"),),
    ),
    "bert": Family(
        mask="full",
        dropout="attention_probs_dropout_prob",
        refused=(
            ("is_decoder", False, "makes the mask causal; valid: an encoder"),
            ("add_cross_attention", False, "attends to another model's states"),
        ),
    ),
    "modernbert": Family(
        mask="full",
        # its setting does not count the query itself
        window=lambda config, layer: None if (side := _layer_window(config, layer)) is None else side + 1,
    ),
    "eurobert": Family(mask="full"),
}


@dataclass(frozen=True)
class Vision:
    """How batches of a vision-language model say where pictures are.

    Attributes:
        blocks: key whose ones are tokens of pictures that see each other both ways; None: the mask is causal.
        has_grid: True if positions of their tokens are those of a grid, position_ids [3, rows, tokens].
    """

    blocks: str | None = None
    has_grid: bool = False


#: Vision-language models by the model_type of their configuration; the family of their text model is planned.
VISION: dict[str, Vision] = {
    "gemma3": Vision(blocks="token_type_ids"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), Vision(has_grid=True)),
}

#: Rotary positions whose frequencies depend on the longest position among the rows that a model is given, so that every
#: rank would have its own.
REFUSED_ROPE_TYPES = ("dynamic", "longrope")

#: Kinds of layers (layer_types) that planned attention does not compute, and why.
REFUSED_LAYERS = {
    "chunked_attention": "its layers attend inside chunks (attention_chunk_size)",
    "linear_attention": "its linear attention layers need their tokens in order on one rank",
}


def attention_config(
    config: Any,
    layer: int,
    *,
    tensor_parallel_size: int = 1,
    tensor_parallel_rank: int = 0,
    has_latents: bool = False,
) -> AttentionConfig:
    """Return the attention of a layer of a Hugging Face model on one tensor-parallel rank.

    Args:
        config: the model's configuration (``model.config``).
        layer: index of the layer, from 0, as the model's `layer_idx`.
        tensor_parallel_size: ranks that share the heads.
        tensor_parallel_rank: number among them; dropout depends on it.
        has_latents: layers of the model can pass on their latents.

    Raises:
        ConfigError: the family is unknown, a setting is not supported, the layer does not exist, or the heads cannot be
            shared.
    """
    family = family_of(config)
    layers = config.num_hidden_layers
    if not 0 <= layer < layers:
        raise ConfigError(f"layer is {layer}; valid: 0 to {layers - 1}, the layers of the model")
    if not 0 <= tensor_parallel_rank < tensor_parallel_size:
        raise ConfigError(f"tensor_parallel_rank is {tensor_parallel_rank}; valid: 0 to {tensor_parallel_size - 1}")
    own = config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config
    heads = own.num_attention_heads
    kv_heads = heads if family.latent is not None else getattr(own, "num_key_value_heads", None) or heads
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % tensor_parallel_size:
            raise ConfigError(
                f"{name} is {count}; valid: a multiple of tensor_parallel_size, which is {tensor_parallel_size}"
            )
    own_width = getattr(own, "head_dim", None) or own.hidden_size // heads
    width, width_v = (own_width, own_width) if family.widths is None else family.widths(own)
    side, rate = family.window(config, layer), dropout_rate(config)
    return AttentionConfig(
        heads=heads // tensor_parallel_size,
        kv_heads=kv_heads // tensor_parallel_size,
        head_dim=width,
        head_dim_v=width_v,
        mask=family.mask,
        window=None if side is None else window_of_side(side, family.mask),
        dropout=rate,
        scale=family.scale(config, layer, width),
        first_head=tensor_parallel_rank * heads // tensor_parallel_size if rate else 0,
        latent=family.latent(config) if has_latents and family.latent is not None else None,
    )


def family_of(config: Any) -> Family:
    """Return the family of a configuration, with its settings checked.

    Raises:
        ConfigError: the family is unknown, or a setting is not supported; names the setting and the valid value.
    """
    name = getattr(config, "model_type", None)
    if name not in FAMILIES:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        reasons = [why for kind, why in REFUSED_LAYERS.items() if kind in (getattr(text, "layer_types", None) or ())]
        why = reasons[0] if reasons else "its attention has not been compared with planned attention"
        why = "its pictures have a place in planned_batch alone" if name in VISION else why
        inner = "its text model's, config.text_config; " if getattr(text, "model_type", None) in FAMILIES else ""
        near = closest_names(str(name), FAMILIES) or list(FAMILIES)[:3]
        raise ConfigError(
            f"model_type is {name!r}: {why}; valid: {inner}{', '.join(near)} and others, {len(FAMILIES)} in all "
            "(mindspeed_cp.integrations.huggingface.families.FAMILIES)"
        )
    family = FAMILIES[name]
    for setting, valid, why in family.refused:
        value = getattr(config, setting, valid)
        if value != valid and not (valid is None and not value):
            raise ConfigError(f"{setting} is {value!r}: it {why}; valid with planned attention: {valid!r}")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        is_fixed = family.has_alpha and parameters.get("alpha")
        if parameters.get("rope_type") in REFUSED_ROPE_TYPES and not is_fixed:
            raise ConfigError(
                f"rope_type is {parameters['rope_type']!r}: its frequencies depend on the longest position of a rank's "
                "own rows; valid with planned attention: default, linear, llama3, yarn, proportional"
            )
    return family


def dropout_rate(config: Any) -> float:
    """Return the dropout rate of a model's attention weights. Raises ConfigError as :func:`family_of`."""
    setting = family_of(config).dropout
    return float(getattr(config, setting) or 0.0) if setting else 0.0


def window_of_side(side: int, mask: str) -> tuple[int, int]:
    """Return the window in which a query sees `side` tokens on a side, itself included, as models count them."""
    return (side - 1, 0) if mask == "causal" else (side - 1, side - 1)


@cache
def latent_layer(model_type: str) -> Any:
    """Return the attention layers' class of a model whose latents can travel: it expands them in a method `expand_kv`;
    None for other models, and where the installed transformers has no such method."""
    if model_type != "deepseek_v3":
        return None
    try:
        module = import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    except ImportError:
        return None
    return module.DeepseekV3Attention if hasattr(module.DeepseekV3Attention, "expand_kv") else None
