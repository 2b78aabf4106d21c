"""Values of Megatron's arguments that planned attention refuses, beside those of TransformerConfig."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_cp.refusals.rule import Rule, is_off

_LAYERS = "spec builds layers of one kind; or install the suite into a spec of your own: install(spec, suite)"
_STATES = "state-space layers need their tokens in order on one rank"
_ENCODER = "plans are of decoders, whose layers all hold the same tokens"
_WRAPPER = "its gradients have not been compared with one rank's; use --use-distributed-optimizer"
_OWN_BATCHES = "it makes batches and losses of its own, which carry no plan"
_SUITE = "give it in context_parallel_suite"


def _has_documents(args: Namespace) -> bool:
    """True if something else than the two flags says that rows have documents: the data set, or --cp-plan-documents."""
    names = ("dataloader_inter_document_masking", "cp_plan_documents")
    return any(getattr(args, name, False) for name in names)


def _null_eod_moved(args: Namespace) -> bool:
    """True if documents end at a token whose default number this Megatron moved."""
    own_data = not getattr(args, "mock_data", False)
    moved = hasattr(args, "null_tokenizer_eod_id") and args.null_tokenizer_eod_id is None
    return bool(args.reset_position_ids) and own_data and moved


#: Rules of arguments that TransformerConfig does not have.
ARGUMENT_RULES = (
    Rule(
        "reset_attention_mask",
        is_off,
        "False, or together with --reset-position-ids",
        "positions tell where documents begin: without it attention would cross them",
        when=lambda args: not args.reset_position_ids and not _has_documents(args),
    ),
    Rule(
        "reset_attention_mask",
        bool,
        "True with --reset-position-ids",
        "attention stays inside the documents whose positions restart",
        when=lambda args: bool(args.reset_position_ids) and not _has_documents(args),
    ),
    Rule(
        "cp_plan_documents",
        is_off,
        "False, or together with --reset-position-ids",
        "documents are told by positions that restart",
        when=lambda args: not args.reset_position_ids,
    ),
    Rule(
        "create_attention_mask_in_dataloader",
        is_off,
        "False",
        "a mask of seq_length x seq_length for every row, which nothing would read: documents say what is visible",
    ),
    Rule(
        "attention_backend",
        lambda v: getattr(v, "name", v) != "local",
        "another one",
        "Megatron 0.19 would put its own attention over the spec's; context_parallel_suite.backend names the kernels",
    ),
    Rule(
        "position_embedding_type",
        lambda v: v in ("rope", "yarn", "learned_absolute", "none"),
        "'rope', 'yarn', 'learned_absolute', 'none'",
        "Megatron's own data sets have no positions of time, height and width (mrope); build that model in a script of "
        "your own, with planned_batch_from",
    ),
    Rule(
        "tokenizer_type",
        lambda v: v != "NullTokenizer",
        "NullTokenizer with --null-tokenizer-eod-id, the end of document in your data",
        "its default is vocab_size - 1 in this Megatron-core, and was vocab_size up to 0.16",
        when=_null_eod_moved,
    ),
    Rule("transformer_impl", lambda v: v != "inference_optimized", "'transformer_engine', 'local'", "of generation"),
    Rule("use_legacy_models", is_off, "False", "models of megatron.legacy take no packed_seq_params"),
    Rule("mla_down_proj_fusion", is_off, "False", "FusedMLASelfAttention rotates in a projection that is not replaced"),
    Rule("heterogeneous_layers_config_path", is_off, "None", _LAYERS),
    Rule("heterogeneous_layers_config_encoded_json", is_off, "None", _LAYERS),
    Rule("hybrid_attention_ratio", is_off, "0.0", _STATES),
    Rule("hybrid_mlp_ratio", is_off, "0.0", _STATES),
    Rule("hybrid_override_pattern", is_off, "None", _STATES),
    Rule("hybrid_layer_pattern", is_off, "None", _STATES),
    Rule("encoder_pipeline_model_parallel_size", is_off, "0", _ENCODER),
    Rule("encoder_tensor_model_parallel_size", is_off, "0", _ENCODER),
    Rule("pipeline_model_parallel_split_rank", is_off, "None", _ENCODER),
    Rule("use_custom_fsdp", is_off, "False", _WRAPPER),
    Rule("use_megatron_fsdp", is_off, "False", _WRAPPER),
    Rule("use_torch_fsdp2", is_off, "False", _WRAPPER),
    Rule("perform_rl_step", is_off, "False", _OWN_BATCHES),
    Rule("logits_load_dir", is_off, "None", "the loss function is the language model's alone"),
    Rule("logits_save_dir", is_off, "None", "ranks hold the rows of a plan, in its order"),
    Rule("hierarchical_context_parallel_sizes", is_off, "None", f"{_SUITE}, where it is the degree of hybrid"),
    Rule("max_seqlen_per_dp_cp_rank", is_off, "None", _SUITE),
)
