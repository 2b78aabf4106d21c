"""Arguments of Megatron that planned attention, batches or losses read; see mindspeed_cp.megatron.arguments.entry."""

from __future__ import annotations

USED = {
    "plans are built for the heads, widths and layers that they give": """
        num_layers hidden_size num_attention_heads group_query_attention num_query_groups kv_channels window_size
        window_attn_skip_freq:0.16- softmax_scale attention_dropout multi_latent_attention q_lora_rank kv_lora_rank
        qk_head_dim qk_pos_emb_head_dim v_head_dim use_mup:0.19- mup_base_hidden_size:0.19- mup_base_head_dim:0.19-
        mup_attn_scale_power:0.19-""",
    "PlannedAttention has the sinks that it asks for": "softmax_type:0.16-",
    "frequencies of the rotation that PlannedRotary applies at the positions of the plan": """
        rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling
        rope_scaling_factor no_rope_freq:0.14- rope_type rotary_scaling_factor mscale mscale_all_dim beta_fast
        beta_slow mrope_section original_max_position_embeddings:0.14- yarn_original_max_position_embeddings:0.19-
        yarn_beta_fast:0.19- yarn_beta_slow:0.19- yarn_correction_range_round_to_int:0.19-
        use_rotary_position_embeddings add_position_embedding""",
    "learned positions are those of the plan, which restart in every document": "max_position_embeddings",
    "ranks of the model, whose groups carry plans, rows and losses": """
        tensor_model_parallel_size context_parallel_size sequence_parallel pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage
        num_virtual_stages_per_pipeline_rank pipeline_model_parallel_layout:0.14- decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split expert_model_parallel_size
        expert_tensor_parallel_size""",
    "forward_step sets it where pipeline stages exchange rows of packed batches": "variable_seq_lengths",
    "rows of a micro-batch, which planned_batch packs and cuts": """
        micro_batch_size seq_length reset_position_ids eod_mask_loss sft:0.14-
        dataloader_inter_document_masking:0.19- eval_micro_batch_size:0.19-""",
    "seed of attention dropout, with the number of the step and the tokens of the micro-batch": "seed",
    "tokens, labels and losses of later positions stay in their documents, by the plan": """
        mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer:0.19- mtp_detach_heads:0.19-""",
    "the loss function checks each micro-batch's loss by it": "check_for_nan_in_loss_and_grad check_for_spiky_loss",
    "spec builds Megatron's own layers by it, and replaces their core attention": """
        transformer_impl num_experts num_moe_experts moe_layer_freq moe_grouped_gemm
        moe_use_legacy_grouped_gemm:-0.16 normalization qk_layernorm qk_l2_norm:0.14- use_te_activation_func:0.16-""",
    "PlannedRouter counts tokens over the ranks that share a micro-batch": """
        moe_router_topk moe_router_enable_expert_bias moe_router_bias_update_rate""",
    "names this package's spec": "spec",
    "attention then takes backends that give the same bits in every run": "deterministic_mode",
}
