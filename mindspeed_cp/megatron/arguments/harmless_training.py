"""Arguments of data, optimizer and parallel layout that planned batches neither read nor contradict."""

from __future__ import annotations

HARMLESS_TRAINING = {
    "how many samples a step has; each micro-batch is planned alone": """
        global_batch_size batch_size rampup_batch_size step_batch_size_schedule:0.19- decrease_batch_size_if_needed
        train_iters train_samples iterations_to_skip phase_transition_iterations:0.16- eval_global_batch_size:0.19-""",
    "where samples come from and how they are read": """
        data_path split train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path
        per_dataset_sequences_path:0.16- dataloader_fast_cache_load:0.16- dataloader_defer_npy_index_mmap:0.16-
        data_cache_path mmap_bin_files mock_data num_workers num_dataset_builder_threads s3_cache_path:-0.12
        object_storage_cache_path:0.14- mid_level_dataset_surplus:0.14- allow_ambiguous_pad_tokens:0.16-
        dataloader_type sft_tokenizer_prompt_format:0.14- fim_data:0.16- fim_rate:0.16- fim_spm_rate:0.16-
        fim_split_sample:0.16- fim_fragment_rate:0.16- fim_no_prefix:0.16- fim_prefix_token:0.16-
        fim_middle_token:0.16- fim_suffix_token:0.16- fim_pad_token:0.16- fim_eod_token:0.16-""",
    "of encoders, BERT, T5 or retrieval, which GPT has none of": """
        encoder_num_layers decoder_num_layers encoder_seq_length decoder_seq_length retriever_seq_length:-0.14
        sample_rate mask_prob short_seq_prob""",
    "of the tokenizer; documents are told by the positions that the dataset makes with it": """
        vocab_size padded_vocab_size:0.14- pad_vocab_size:0.19- vocab_file merge_file vocab_extra_ids
        tokenizer_model tokenizer_metadata:0.16-0.16 metadata_path:0.19- tokenizer_special_tokens:0.16-0.16
        special_tokens:0.19- legacy_tokenizer:0.16-0.16 tiktoken_pattern tiktoken_num_special_tokens
        tiktoken_special_tokens:-0.16 tokenizer_sentencepiece_legacy:0.16-
        tokenizer_sentencepiece_ignore_extra_whitespaces:0.19- tokenizer_hf_use_fast:0.16-0.16
        tokenizer_hf_no_use_fast:0.19- tokenizer_hf_include_special_tokens:0.16-0.16
        tokenizer_hf_no_include_special_tokens:0.19- trust_remote_code:0.16- null_tokenizer_eod_id:0.19-
        null_tokenizer_pad_id:0.19- chat_template:0.19-""",
    "when and how often the model is evaluated; evaluation plans its batches like training": """
        eval_iters eval_interval start_eval_at_iter:0.19- skip_train full_validation:0.14-
        multiple_validation_sets:0.14- validation_set_names:0.19-""",
    "of the optimizer, after all gradients": """
        weight_decay start_weight_decay end_weight_decay weight_decay_incr_style apply_wd_to_qk_layernorm:0.16-
        clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum lion_beta1:0.19- lion_beta2:0.19-
        no_weight_decay_cond_type:0.16- optimizer optimizer_cpu_offload optimizer_offload_fraction
        optimizer_cuda_graph:0.19- use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d
        dump_param_to_param_group_map:0.16- pin_cpu_grads pin_cpu_params use_precision_aware_optimizer
        main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype check_for_large_grads""",
    "sums and shares gradients and weights; planned batches give them as Megatron's do": """
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step
        align_grad_reduce align_param_gather ddp_num_buckets ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw
        ddp_average_in_collective ddp_reduce_scatter_with_fp32_accumulation:0.16-
        ddp_param_name_patterns_for_fp32_local_accumulation:0.19- gradient_accumulation_fusion
        num_distributed_optimizer_instances suggested_communication_unit_size use_layer_wise_param_layout:0.19-
        wgrad_deferral_limit async_tensor_model_parallel_allreduce:-0.16""",
    "without effect unless FSDP, which is refused": """
        data_parallel_sharding_strategy outer_dp_sharding_strategy:0.16- gradient_reduce_div_fusion
        fsdp_double_buffer:0.14- fsdp_manual_registration:0.16- enable_full_sharding_in_hsdp:0.14-
        torch_fsdp2_reshard_after_forward:0.14- fsdp_db_use_persist_buf_on_alloc_fail:0.19-""",
    "how process groups are made and how they send": """
        distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init:0.16- local_rank
        lazy_mpu_init nccl_communicator_config_path nccl_ub:0.14- disable_symmetric_registration:0.16-
        use_sharp:0.14- sharp_enabled_group:0.14- create_all_gather_group:0.16- high_priority_stream_groups:0.14-
        enable_gloo_process_groups:-0.16 use_gloo_process_groups:0.19- use_tp_pp_dp_mapping fake_process_group:0.16-
        pipeline_model_parallel_comm_backend disable_jit_fuser:0.16-""",
    "when pipeline stages exchange rows": """
        overlap_p2p_comm overlap_p2p_comm_warmup_flush batch_p2p_sync use_ring_exchange_p2p
        deallocate_pipeline_outputs microbatch_group_size_per_vp_stage scatter_gather_tensors_in_pipeline:-0.16
        barrier_with_L1_time""",
    "of checkpoints on disk": "hetereogenous_dist_checkpoint:0.14- replication replication_jump replication_factor",
    "profiles, logs, exits and collects garbage": """
        profile profile_step_start profile_step_end use_pytorch_profiler profile_ranks record_memory_history
        memory_snapshot_path log_interval tensorboard_dir result_rejected_tracker_filename empty_unused_memory_level
        check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval:0.19- train_sync_interval
        exit_interval exit_duration_in_mins exit_signal_handler exit_signal:0.16-
        exit_signal_handler_for_dataloader:0.16- exit_signal_handler_for_training:0.19- manual_gc manual_gc_interval
        manual_gc_eval""",
    "without effect unless logits_load_dir or logits_save_dir, which are refused": """
        logits_save_top_k:0.19- logits_save_top_p:0.19- logits_save_top_p_min_k:0.19- logits_save_dtype:0.19-
        logits_load_decode_threads:0.19- logits_load_prefetch_factor:0.19- logits_load_msc_prefetch_depth:0.19-
        logits_load_kd_loss_alpha:0.19- logits_load_ignore_errors:0.19-""",
    "of older ways to give the same": """
        model_parallel_size yaml_cfg enable_experimental:0.14- deprecated_use_mcore_models""",
}
