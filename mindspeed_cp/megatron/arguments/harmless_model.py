"""Arguments that change the model or its speed, and neither attention, positions nor the loss of planned batches."""

from __future__ import annotations

HARMLESS_MODEL = {
    "acts on each token alone, so it does not matter which rank holds the token": """
        ffn_hidden_size hidden_dropout fp32_residual_connection apply_residual_connection_post_layernorm
        norm_epsilon:-0.14 layernorm_epsilon apply_layernorm_1p:-0.14 layernorm_zero_centered_gamma add_bias_linear
        add_qkv_bias gated_linear_unit activation_func activation_func_fp8_input_store
        activation_func_clamp_value:0.16- glu_linear_offset:0.16- openai_gelu squared_relu swiglu quick_geglu:0.16-
        onnx_safe untie_embeddings_and_output_weights attention_output_gate:0.16- make_vocab_size_divisible_by
        fp16_lm_cross_entropy cross_entropy_loss_fusion cross_entropy_fusion_impl bias_activation_fusion
        bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion use_fused_weighted_squared_relu:0.14-
        persist_layer_norm no_persist_layer_norm memory_efficient_layer_norm fused_residual_rmsnorm:0.19-
        use_transformer_engine_op_fuser:0.19- mup_width_mult:0.19- mup_embedding_mult:0.19- mup_output_mult:0.19-
        use_grouped_gemm_for_dense_mlp:0.19-""",
    "of Megatron's own core attention, which PlannedAttention replaces; its sums are float32": """
        masked_softmax_fusion attention_softmax_in_fp32 apply_query_key_layer_scaling use_flash_attn
        flash_attention_version:0.19- kitchen_attention_backend:0.16-""",
    "without effect unless qk_clip, which is refused": "qk_clip_alpha:0.16- qk_clip_threshold:0.16-",
    "without effect unless experimental_attention_variant, which is refused": """
        dsa_indexer_n_heads:0.16- dsa_indexer_head_dim:0.16- dsa_indexer_topk:0.16- dsa_indexer_topk_freq:0.19-
        dsa_indexer_skip_topk_offset:0.19- dsa_indexer_loss_coeff:0.16- dsa_indexer_use_sparse_loss:0.16-
        dsa_kernel_backend:0.19- dsa_indexer_rope_interleaved:0.19- dsa_indexer_rotate_activation:0.19-
        dsa_indexer_scoring_relu:0.19- dsa_indexer_k_norm_epsilon:0.19- dsa_indexer_k_norm_fp32:0.19-
        linear_attention_freq:0.16- linear_conv_kernel_dim:0.16- linear_key_head_dim:0.16-
        linear_value_head_dim:0.16- linear_num_key_heads:0.16- linear_num_value_heads:0.16-
        experimental_attention_variant_loss_scale_func:0.19-""",
    "of multi-token prediction: where its layers are, and the scale of its gradients": """
        mtp_hybrid_override_pattern:0.19- mtp_standalone:0.16- mtp_grad_scale_func:0.19-""",
    "of state-space layers, which are refused": """
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads:0.14- use_mamba_mem_eff_path:0.14-
        disable_mamba_mem_eff_path:0.14-0.14 mamba_training_ssm_states_dtype:0.19-""",
    "without effect unless position_embedding_type 'relative', which is refused": """
        relative_attention_num_buckets relative_attention_max_distance""",
    "without effect unless CUDA graphs, which are refused": """
        cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_scope
        cuda_graph_scope_deprecated:0.19- cuda_graph_modules:0.19- moe_pad_experts_for_cuda_graph_inference:0.16-
        delay_offload_until_cuda_graph:0.19-""",
    "without effect unless overlap_moe_expert_parallel_comm, which is refused": """
        delay_wgrad_compute:0.14- ep_overlap_early_attn_memory_release:0.16-""",
    "without effect unless tp_comm_overlap, which is refused": """
        tp_comm_overlap_cfg tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_bulk_dgrad
        tp_comm_bulk_wgrad tp_comm_split_ag tp_comm_split_rs tp_comm_atomic_ag tp_comm_atomic_rs
        tp_comm_bootstrap_backend tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1""",
    "the experts' own; routing is a function of each token": """
        moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate:0.16-
        moe_shared_expert_overlap use_grouped_gemm_for_shared_expert:0.19-
        moe_shared_expert_glu_interleave_size:0.19- moe_mlp_glu_interleave_size:0.19- moe_router_dtype
        moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
        moe_router_topk_scaling_factor moe_router_topk_limited_devices moe_router_fusion:0.14-
        moe_router_padding_for_fp8:0.14- moe_router_padding_for_quantization:0.16- moe_apply_probs_on_input
        moe_latent_size:0.16- moe_extended_tp:-0.16 moe_layer_recompute moe_permute_fusion
        moe_single_grouped_weight:0.19- moe_single_grouped_bias:0.19- moe_grad_scale_func:0.19-""",
    "how tokens travel to experts; the counts of each rank travel first": """
        moe_enable_deepep moe_deepep_num_sms:0.14- moe_flex_dispatcher_num_sms:0.19-
        high_priority_a2a_comm_stream:0.19-""",
    "HybridEP pads unequal numbers of tokens by it; without, moe_flex_dispatcher_backend 'hybridep' is refused": """
        moe_hybridep_pad_uneven_dispatch_inputs:0.19-""",
    "of HybridEP, which needs moe_hybridep_pad_uneven_dispatch_inputs": """
        moe_hybridep_num_sms:0.16- moe_permute_fusion_into_hybridep:0.19- moe_hybridep_num_blocks_permute:0.19-
        moe_hybridep_num_blocks_unpermute:0.19- moe_hybridep_num_sms_preprocessing:0.19-""",
    "needs moe_ncclep_static_shape, which is refused": "moe_ncclep_zero_copy:0.19-",
    "without effect unless moe_expert_rank_capacity_factor, which is refused where ranks share a micro-batch": """
        moe_paged_stash:0.19- moe_paged_stash_page_size:0.19- moe_paged_stash_buffer_size_factor_cuda:0.19-
        moe_paged_stash_buffer_size_factor_cpu:0.19-""",
    "without effect unless moe_expert_capacity_factor, which is refused where ranks share a micro-batch": """
        moe_token_dropping moe_pad_expert_input_to_capacity moe_token_drop_policy""",
    "of routing by quantiles, which is refused": "moe_router_quantile_balancing_ema:0.19-",
    "for benchmarks: routing does not follow the model": """
        moe_router_force_load_balancing:0.14- moe_router_force_biased:0.19-""",
    "noise drawn by each rank; results depend on the rank count as without context parallelism": "moe_input_jitter_eps",
    "says how a model is begun from a checkpoint": "moe_use_upcycling moe_upcycling_granularity:0.14-",
    "the tensor-parallel size by default; more gives gtp_weight_remat_size, which is refused": """
        tensor_parallel_num_weight_shards:0.19- expert_tensor_parallel_num_weight_shards:0.19-""",
    "logs only": "moe_per_layer_logging config_logger_dir",
    "linear layers compute in lower precision, on each rank's own rows, which are padded to what their GEMM takes": """
        fp8 fp8_recipe fp8_param fp8_param_gather fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo
        fp8_wgrad fp8_output_proj:0.19- fp8_quantizer_factory:0.16- tp_only_amax_red first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4:0.16- fp4_recipe:0.16- fp4_param:0.16-
        fp4_param_gather:0.19- fp4_quantizer_factory:0.16- keep_fp8_transpose_cache_when_using_custom_fsdp:-0.12
        keep_fp8_transpose_cache:0.14- disable_parameter_transpose_cache te_precision_config_file:0.16-
        use_kitchen:0.14- kitchen_config_file:0.14-0.14 kitchen_recipe_number:0.14-0.14 quant_recipe:0.14-
        reuse_grad_buf_for_mxfp8_param_ag:0.14-""",
    "initial values of weights": """
        init_method output_layer_init_method init_method_std init_method_xavier_uniform embedding_init_method:0.14-
        embedding_init_method_std:0.14- perform_initialization use_cpu_initialization init_model_with_meta_device
        data_parallel_random_init""",
    "recomputation and offloading keep numbers as they are": """
        recompute_granularity recompute_method recompute_num_layers recompute_modules recompute_activations
        distribute_saved_activations checkpoint_activations num_microbatches_with_partial_activation_checkpoints
        cpu_offloading cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering:0.14- cpu_offloading_retain_pinned_cpu_buffers:0.19-""",
    "without effect unless fine_grained_activation_offloading, which is refused": """
        offload_modules:0.16- min_offloaded_tensor_size:0.16- delta_offload_bytes_across_pp_ranks:0.19-
        activation_offload_fraction:0.19- fine_grained_offloading_max_inflight_offloads:0.19-""",
    "precision of parameters and gradients": """
        fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype grad_reduce_in_bf16 loss_scale
        initial_loss_scale min_loss_scale loss_scale_window hysteresis accumulate_allreduce_grads_in_fp32
        disable_bf16_reduced_precision_matmul""",
    "for generation, which needs a model built from the original spec": """
        max_tokens_to_oom output_bert_embeddings bert_embedder_type use_legacy_static_engine:0.16-
        decode_only_cuda_graphs:0.16- nccl_all_reduce_for_prefill:0.14- enable_chunked_prefill:0.19-
        num_speculative_tokens:0.19- offset_sampling_seed_by_dp_rank:0.19- disable_chunked_prefill:0.16-0.16
        mamba_inference_conv_states_dtype:0.19- mamba_inference_ssm_states_dtype:0.19- symmetric_ar_type:0.14-
        mlp_chunks_for_prefill:0.14- use_inference_optimized_layers:0.16-""",
    "of the random state: masks of hidden dropout differ between rank counts, in Megatron too": """
        use_te_rng_tracker te_rng_tracker inference_rng_tracker""",
    "of other models than GPT": "bert_binary_head test_mode clone_scatter_output_in_embedding",
    "callables and states that Megatron sets itself": """
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func""",
}
