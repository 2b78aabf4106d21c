"""Values of TransformerConfig that planned attention supports, and the reason why the others are refused."""

from __future__ import annotations

from typing import Any

from mindspeed_cp.refusals.rule import Rule, has_experts, is_latent, is_off, is_split


def _sums_twice(config: Any) -> bool:
    """True where Megatron adds up a gradient that every tensor-parallel rank has as a whole."""
    whole = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
    return is_latent(config) and whole and config.q_lora_rank is not None


def _needs_equal_rows(config: Any) -> bool:
    """True where the flex dispatcher sends tokens of experts, and does not pad them to the largest number of a rank."""
    flex = getattr(config, "moe_token_dispatcher_type", None) == "flex"
    return has_experts(config) and flex and not getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False)


def _names(value: Any) -> set[Any]:
    return set(value) if isinstance(value, (list, tuple)) else {value}


_FP8 = "attention runs in the dtype of query, key and value"
_ROTARY = "rotary positions come from the plan and are applied by PlannedAttention"
_RANKS = "a plan already gives each document the ranks it needs"
_REPLAY = "every micro-batch has its own plan and cannot be replayed"
_UNEVEN = "ranks hold unequal numbers of tokens"
_SHARDS = "weights that other ranks hold have not been compared with one rank's"
_OWN_COUNT = "each rank would drop tokens by its own count, so the model would depend on the rank count"
_SPLIT = "tokens on several ranks"

MODEL_RULES = (
    Rule(
        "calculate_per_token_loss",
        bool,
        "True",
        "ranks hold unequal numbers of tokens, so averaging their means would make gradients depend on the rank count",
    ),
    Rule("qk_clip", is_off, "False", "the largest logit is not reported; qk_layernorm bounds it instead"),
    Rule("log_max_attention_logit", is_off, "False", "the largest logit is not reported"),
    Rule("experimental_attention_variant", lambda v: v is None, "None", "use softmax attention in every layer"),
    Rule("is_hybrid_model", is_off, "False", "state-space layers need their tokens in order on one rank"),
    Rule("apply_rope_fusion", is_off, "False", _ROTARY),
    Rule("fused_single_qkv_rope", is_off, "False", _ROTARY),
    Rule("hybrid_context_parallel", is_off, "False", _RANKS),
    Rule("dynamic_context_parallel", is_off, "False", _RANKS),
    Rule("fp8_dot_product_attention", is_off, "False", _FP8),
    Rule("fp8_multi_head_attention", is_off, "False", _FP8),
    Rule("use_kitchen_attention", is_off, "False", "leave the choice of kernel to the suite's backend"),
    Rule("enable_cuda_graph", is_off, "False", _REPLAY),
    Rule("external_cuda_graph", is_off, "False", _REPLAY),
    Rule("cuda_graph_impl", lambda v: v in (None, "none"), "'none'", _REPLAY),
    Rule("tp_comm_overlap", is_off, "False", f"its buffers have the same number of rows on all ranks, but {_UNEVEN}"),
    Rule(
        "defer_embedding_wgrad_compute",
        is_off,
        "False",
        "it gathers the rows of every micro-batch into a buffer of the first one's size, and micro-batches differ in "
        "rows",
        when=lambda config: bool(config.sequence_parallel),
        case="sequence parallelism",
    ),
    Rule(
        "mtp_use_repeated_layer",
        is_off,
        "False",
        "its depths share a layer, whose number decides which attention weights are dropped, so that all would drop "
        "the same; or attention_dropout 0.0",
        when=lambda config: bool(config.attention_dropout) and (config.mtp_num_layers or 0) > 1,
        case="attention dropout and several layers of multi-token prediction",
    ),
    Rule(
        "fine_grained_activation_offloading",
        is_off,
        "False",
        "it keeps host memory for every number of rows that a micro-batch ever had; use recompute_granularity",
    ),
    Rule("overlap_moe_expert_parallel_comm", is_off, "False", "its schedule of half layers carries no plan"),
    Rule(
        "overlap_dispatch_backward_with_experts_wgrad",
        is_off,
        "False",
        f"its backward has not been tried where {_UNEVEN}",
    ),
    Rule(
        "batch_invariant_mode", is_off, "False", "which tiles a token is in depends on the other documents of its row"
    ),
    Rule("heterogeneous_block_specs", is_off, "False", "a micro-batch has plans for layers that differ by window only"),
    Rule("gtp_weight_remat_size", lambda v: v in (None, 1), "1", _SHARDS),
    Rule("expert_gtp_weight_remat_size", lambda v: v in (None, 1), "1", _SHARDS),
    Rule("flash_decode", is_off, "False", "generate with a model built from the original spec"),
    # Multi-latent attention
    Rule(
        "rotary_interleaved",
        is_off,
        "False",
        "the channels of multi-latent attention are interleaved as they are",
        when=is_latent,
        case="multi-latent attention",
    ),
    Rule(
        "no_rope_freq",
        is_off,
        "None",
        "multi-latent attention rotates in every layer",
        when=is_latent,
        case="multi-latent attention",
    ),
    Rule("cache_mla_latents", is_off, "False", "it is for generation; use a model built from the original spec"),
    Rule(
        "qk_layernorm",
        is_off,
        "False",
        "Megatron would add up the gradient of the query's norm once for every tensor-parallel rank; or set "
        "sequence_parallel=True",
        when=_sums_twice,
        case="multi-latent attention with q_lora_rank and tensor without sequence parallelism",
    ),
    # Experts
    Rule(
        "moe_token_dispatcher_type",
        lambda v: v != "allgather",
        "'alltoall'",
        "ranks hold unequal numbers of tokens, which the other one cannot gather",
        when=lambda config: has_experts(config) and config.expert_model_parallel_size > 1,
        case="expert parallelism",
    ),
    Rule(
        "moe_flex_dispatcher_backend",
        lambda v: v != "hybridep",
        "'deepep'",
        f"HybridEP takes as many tokens from every rank, but {_UNEVEN}; or, in Megatron 0.19, "
        "moe_hybridep_pad_uneven_dispatch_inputs",
        when=_needs_equal_rows,
        case="the flex dispatcher, without moe_hybridep_pad_uneven_dispatch_inputs",
    ),
    Rule(
        "mlp_chunks_for_training",
        lambda v: v in (None, 0, 1),
        "1",
        "a rank with fewer rows than chunks would send to experts less often than the others, which wait for it",
        when=has_experts,
        case="experts",
    ),
    Rule("moe_expert_capacity_factor", lambda v: v is None, "None", _OWN_COUNT, when=is_split, case=_SPLIT),
    Rule("moe_expert_rank_capacity_factor", lambda v: v is None, "None", _OWN_COUNT, when=is_split, case=_SPLIT),
    Rule("moe_ncclep_static_shape", is_off, "False", f"{_UNEVEN}, for which buffers of one shape have no place"),
    Rule("moe_enable_routing_replay", is_off, "False", "recorded routes are those of other rows"),
    Rule(
        "moe_router_load_balancing_type",
        lambda v: not {"sinkhorn", "quantile_balancing"} & _names(v),
        "'aux_loss', 'seq_aux_loss', 'global_aux_loss', 'none'",
        "each rank would balance its own tokens, so the model would depend on the rank count",
        when=lambda config: has_experts(config) and is_split(config),
        case="experts, tokens on several ranks",
    ),
)
