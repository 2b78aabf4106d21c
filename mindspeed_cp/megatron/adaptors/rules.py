"""Values of TransformerConfig that planned attention supports, and the reason why the others are refused."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp.megatron.patches.multi_token import PACKED
from mindspeed_cp.megatron.rule import Rule


def _off(value: Any) -> bool:
    return not value


def _is_latent(config: TransformerConfig) -> bool:
    return bool(config.multi_latent_attention)


def _is_split(config: TransformerConfig) -> bool:
    """True if a micro-batch's tokens are on several ranks."""
    return config.context_parallel_size > 1 or bool(config.sequence_parallel)


def _sums_twice(config: TransformerConfig) -> bool:
    """True where Megatron adds up a gradient that every tensor-parallel rank has as a whole."""
    whole = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
    return _is_latent(config) and whole and config.q_lora_rank is not None


def _divides_losses(config: TransformerConfig) -> bool:
    """True if tokens are split and Megatron (before 0.16) has no place for PlannedRouter in the spec."""
    return _is_split(config) and "router" not in MoESubmodules.__dataclass_fields__


def _interleaves_two_stages(config: TransformerConfig) -> bool:
    """True if each of two pipeline stages is both before and behind the other."""
    return config.pipeline_model_parallel_size == 2 and (config.virtual_pipeline_model_parallel_size or 1) > 1


_FP8 = "attention runs in the dtype of query, key and value"
_ROTARY = "rotary positions come from the plan and are applied by PlannedAttention"
_RANKS = "a plan already gives each document the ranks it needs"
_REPLAY = "every micro-batch has its own plan and cannot be replayed"
_UNEVEN = "ranks hold unequal numbers of tokens"
_SHARDS = "weights that other ranks hold have not been compared with one rank's"
_DIVIDED_LOSS = "this Megatron-core divides it by the number of ranks; use megatron-core 0.16.1 or later"

RULES = (
    Rule(
        "calculate_per_token_loss",
        bool,
        "True",
        "ranks hold unequal numbers of tokens, so averaging their means would make gradients depend on the rank count",
    ),
    Rule("softmax_type", lambda v: v == "vanilla", "'vanilla'", "attention sinks are not in this version"),
    Rule("qk_clip", _off, "False", "the largest logit is not reported; qk_layernorm bounds it instead"),
    Rule("log_max_attention_logit", _off, "False", "the largest logit is not reported"),
    Rule("experimental_attention_variant", lambda v: v is None, "None", "use softmax attention in every layer"),
    Rule("is_hybrid_model", _off, "False", "state-space layers need their tokens in order on one rank"),
    Rule(
        "mtp_num_layers",
        _off,
        "None",
        "before 0.16 Megatron-core shifts tokens across the documents of a row; use megatron-core 0.16.1 or later",
        when=lambda config: not PACKED,
    ),
    Rule("apply_rope_fusion", _off, "False", _ROTARY),
    Rule("fused_single_qkv_rope", _off, "False", _ROTARY),
    Rule("hybrid_context_parallel", _off, "False", _RANKS),
    Rule("dynamic_context_parallel", _off, "False", _RANKS),
    Rule("fp8_dot_product_attention", _off, "False", _FP8),
    Rule("fp8_multi_head_attention", _off, "False", _FP8),
    Rule("use_kitchen_attention", _off, "False", "leave the choice of kernel to the suite's backend"),
    Rule("enable_cuda_graph", _off, "False", _REPLAY),
    Rule("external_cuda_graph", _off, "False", _REPLAY),
    Rule("cuda_graph_impl", lambda v: v in (None, "none"), "'none'", _REPLAY),
    Rule("tp_comm_overlap", _off, "False", f"its buffers have the same number of rows on all ranks, but {_UNEVEN}"),
    Rule("overlap_moe_expert_parallel_comm", _off, "False", "its schedule of half layers carries no plan"),
    Rule("batch_invariant_mode", _off, "False", "which tiles a token is in depends on the other documents of its row"),
    Rule("heterogeneous_block_specs", _off, "False", "a micro-batch has plans for layers that differ by window only"),
    Rule("gtp_weight_remat_size", lambda v: v in (None, 1), "1", _SHARDS),
    Rule("expert_gtp_weight_remat_size", lambda v: v in (None, 1), "1", _SHARDS),
    Rule(
        "batch_p2p_comm",
        _off,
        "False, with overlap_p2p_comm True",
        "two virtual stages of two ranks exchange activations and gradients in one list, and take one for the other",
        when=_interleaves_two_stages,
    ),
    Rule("flash_decode", _off, "False", "generate with a model built from the original spec"),
    # Multi-latent attention
    Rule(
        "rotary_interleaved",
        _off,
        "False",
        "the channels of multi-latent attention are interleaved as they are",
        when=_is_latent,
    ),
    Rule("no_rope_freq", _off, "None", "multi-latent attention rotates in every layer", when=_is_latent),
    Rule(
        "no_rope_freq",
        _off,
        "None",
        "it has no entries for layers of multi-token prediction",
        when=lambda config: bool(getattr(config, "mtp_num_layers", None)),
    ),
    Rule(
        "mrope_section",
        lambda v: v is None,
        "None",
        "multi-latent attention has no positions of time, height and width",
        when=_is_latent,
    ),
    Rule("cache_mla_latents", _off, "False", "it is for generation; use a model built from the original spec"),
    Rule(
        "qk_layernorm",
        _off,
        "False",
        "Megatron would add up the gradient of the query's norm once for every tensor-parallel rank; or set "
        "sequence_parallel=True",
        when=_sums_twice,
    ),
    # Experts
    Rule(
        "moe_token_dispatcher_type",
        lambda v: v != "allgather",
        "'alltoall'",
        "ranks hold unequal numbers of tokens, which the other one cannot gather",
        when=lambda config: bool(config.num_moe_experts) and config.expert_model_parallel_size > 1,
    ),
    Rule(
        "moe_expert_capacity_factor",
        lambda v: v is None,
        "None",
        "each rank would drop tokens by its own count, so the model would depend on the rank count",
        when=_is_split,
    ),
    Rule(
        "moe_expert_rank_capacity_factor",
        lambda v: v is None,
        "None",
        "each rank would drop tokens by its own count, so the model would depend on the rank count",
        when=_is_split,
    ),
    Rule("moe_ncclep_static_shape", _off, "False", f"{_UNEVEN}, for which buffers of one shape have no place"),
    Rule("moe_enable_routing_replay", _off, "False", "recorded routes are those of other rows"),
    Rule(
        "moe_router_load_balancing_type",
        lambda v: not {"sinkhorn", "quantile_balancing"} & set([v] if isinstance(v, str) else v),
        "'aux_loss', 'seq_aux_loss', 'global_aux_loss', 'none'",
        "each rank would balance its own tokens, so the model would depend on the rank count",
        when=lambda config: bool(config.num_moe_experts) and _is_split(config),
    ),
    Rule(
        "moe_router_enable_expert_bias",
        _off,
        "False",
        "this Megatron-core would count rows of padding, which a rank without tokens has; use megatron-core 0.16.1 or "
        "later",
        when=_divides_losses,
    ),
    Rule("moe_aux_loss_coeff", _off, "0.0", _DIVIDED_LOSS, when=_divides_losses),
    Rule("moe_z_loss_coeff", _off, "None", _DIVIDED_LOSS, when=_divides_losses),
)
