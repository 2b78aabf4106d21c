"""Which versions have the arguments that are refused; those that all have are left out."""

from __future__ import annotations

COMM_TYPE_REASON = "valid: the default, or a name of context_parallel_suite.algorithm, which takes its place"

#: Name -> span, as read_span reads it; "none" for settings that no listed version has (0.17, 0.18 or development).
REFUSED_SPANS: dict[str, str] = {
    "qk_clip": "0.16-",
    "log_max_attention_logit": "0.16-",
    "experimental_attention_variant": "0.16-",
    "fused_single_qkv_rope": "0.16-",
    "hybrid_context_parallel": "0.16-",
    "dynamic_context_parallel": "none",
    "use_kitchen_attention": "0.16-",
    "cuda_graph_impl": "0.16-",
    "overlap_moe_expert_parallel_comm": "0.14-",
    "overlap_dispatch_backward_with_experts_wgrad": "0.19-",
    "fine_grained_activation_offloading": "0.16-",
    "moe_flex_dispatcher_backend": "0.16-",
    "mlp_chunks_for_training": "0.19-",
    "batch_invariant_mode": "0.16-",
    "gtp_weight_remat_size": "0.19-",
    "expert_gtp_weight_remat_size": "0.19-",
    "cache_mla_latents": "0.14-",
    "moe_expert_rank_capacity_factor": "0.19-",
    "moe_ncclep_static_shape": "0.19-",
    "moe_enable_routing_replay": "0.16-",
    "use_legacy_models": "-0.16",
    "mla_down_proj_fusion": "0.19-",
    "hybrid_attention_ratio": "-0.16",
    "hybrid_mlp_ratio": "-0.16",
    "hybrid_layer_pattern": "0.19-",
    "encoder_pipeline_model_parallel_size": "-0.12",
    "encoder_tensor_model_parallel_size": "-0.12",
    "pipeline_model_parallel_split_rank": "-0.12",
    "use_custom_fsdp": "-0.12",
    "use_megatron_fsdp": "0.14-",
    "perform_rl_step": "0.16-",
    "logits_load_dir": "0.19-",
    "logits_save_dir": "0.19-",
    "max_seqlen_per_dp_cp_rank": "0.16-",
}
