"""Arguments of generation, of reinforcement learning, and of other groups of which every one is harmless."""

from __future__ import annotations

HARMLESS_GROUPS = {
    "for generation, which needs a model built from the original spec, by its servers": """
        inference_batch_times_seqlen_threshold inference_coordinator_port:0.16-
        inference_cuda_graph_all_prefills:0.19- inference_cuda_graph_max_tokens:0.19-
        inference_cuda_graph_scope:0.19- inference_disable_ep_consensus:0.19-
        inference_disable_triton_nvls_kernels:0.19- inference_dynamic_batching
        inference_dynamic_batching_async_sched_mode:0.19- inference_dynamic_batching_block_size:0.16-
        inference_dynamic_batching_buffer_guaranteed_fraction:-0.14
        inference_dynamic_batching_buffer_overflow_factor:-0.14 inference_dynamic_batching_buffer_size_gb
        inference_dynamic_batching_chunk_size:0.14-0.14
        inference_dynamic_batching_cuda_graph_max_tokens:0.16-0.16
        inference_dynamic_batching_cuda_graph_mixed_prefill_count:0.16-
        inference_dynamic_batching_cuda_graph_sizing_distribution:0.19-
        inference_dynamic_batching_enable_prefix_caching:0.19- inference_dynamic_batching_logprobs_mode:0.19-
        inference_dynamic_batching_mamba_memory_ratio:0.19- inference_dynamic_batching_max_requests:0.16-
        inference_dynamic_batching_max_requests_override:-0.14 inference_dynamic_batching_max_tokens:0.16-
        inference_dynamic_batching_max_tokens_override:-0.14 inference_dynamic_batching_num_cuda_graphs:0.14-
        inference_dynamic_batching_paused_buffer_size_gb:0.16-
        inference_dynamic_batching_prefix_caching_coordinator_policy:0.19-
        inference_dynamic_batching_prefix_caching_eviction_policy:0.19-
        inference_dynamic_batching_prefix_caching_mamba_gb:0.19-
        inference_dynamic_batching_prefix_caching_routing_alpha:0.19-
        inference_dynamic_batching_sampling_backend:0.19-
        inference_dynamic_batching_track_generated_token_events:0.19-
        inference_dynamic_batching_track_paused_request_events:0.16-
        inference_dynamic_batching_unified_memory_level:0.16- inference_fuse_tp_communication:0.16-
        inference_grouped_gemm_backend:0.19- inference_logging_step_interval:0.16-
        inference_max_batch_size:-0.16 inference_max_requests:0.19- inference_max_seq_length
        inference_moe_disable_fused_quant_kernels:0.19- inference_moe_token_dispatcher_type:0.19-
        inference_sampling_seed:0.16- inference_shards:0.19- inference_text_gen_server_logging:0.19-
        inference_use_synchronous_zmq_collectives:0.19- inference_wandb_logging:0.16-""",
    "without effect unless perform_rl_step, which is refused": """
        refit_method:0.16- grpo_clamp_eps_lower:0.16- grpo_clamp_eps_upper:0.16- grpo_entropy_term_weight:0.16-
        grpo_filter_groups_with_same_reward:0.16- grpo_group_size:0.16- grpo_iterations:0.16- grpo_kl_beta:0.16-
        grpo_prompts_per_step:0.16- langrl_env_config:0.16- langrl_external_server:0.16-0.16
        langrl_inference_server_conversation_template:0.16-0.16 langrl_inference_server_type:0.16-0.16
        rl_consumption_granularity:0.19- rl_default_temperature:0.16- rl_default_top_k:0.16-
        rl_default_top_p:0.16- rl_generation_lag:0.19- rl_importance_sampling_truncation_coef:0.16-
        rl_inference_expert_model_parallel_size:0.16- rl_inference_expert_tensor_model_parallel_size:0.16-
        rl_inference_logprobs_is_correction:0.16- rl_inference_model_unified_memory_level:0.16-
        rl_inference_parsers:0.19- rl_inference_pipeline_model_parallel_size:0.16-
        rl_inference_tensor_model_parallel_size:0.16- rl_kv_cache_management_mode:0.19-
        rl_offload_inference_model_weights_when_idle:0.16- rl_offload_kv_cache_during_training:0.16-0.16
        rl_offload_optimizer_during_inference:0.16- rl_parallel_generation_tasks:0.16-0.16
        rl_partial_rollouts:0.16- rl_persist_cuda_graphs:0.19- rl_profile:0.19- rl_profile_dir:0.19-
        rl_prompts_per_eval:0.16- rl_remove_kv_cache_during_training:0.16-0.16 rl_reset_cuda_graphs:0.16-0.16
        rl_sequence_packing_algo:0.16- rl_sequence_packing_max_sequences_per_bin:0.16- rl_skip_bos_token:0.16-
        rl_submission_granularity:0.19- rl_training_cuda_graphs:0.16- rl_use_sequence_packing:0.16-
        rl_verify_model_weights_swap:0.16-""",
    "of the optimizer Muon, after all gradients": """
        muon_coefficient_type:0.19- muon_extra_scale_factor:0.16- muon_fp32_matmul_prec:0.16-
        muon_momentum:0.16- muon_nesterov:0.19- muon_num_ns_steps:0.16- muon_scalar_optimizer:0.19-
        muon_scale_mode:0.16- muon_split_qkv:0.16- muon_tp_mode:0.16- muon_use_nesterov:0.16-0.16""",
    "without effect unless FSDP of Megatron, which is refused": """
        megatron_fsdp_enable_fine_grained_param_gather:0.19- megatron_fsdp_grad_comm_dtype:0.19-
        megatron_fsdp_main_grads_dtype:0.19- megatron_fsdp_main_params_dtype:0.19-
        megatron_fsdp_max_pool_double_buffer:0.19-""",
    "of PyTorch's flight recorder, which writes down collectives": """
        flight_recorder_dump_on_timeout:0.19- flight_recorder_dump_path:0.19-
        flight_recorder_extra_dump_on_exec:0.19- flight_recorder_include_only_active:0.19-
        flight_recorder_include_stack_trace:0.19- flight_recorder_trace_buffer_size:0.19-""",
}
