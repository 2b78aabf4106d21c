"""What Megatron's start refuses, a conversion refuses: both go by one table."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_cp.convert import convert_flags
from mindspeed_cp.convert.rules import ARITIES, RULES, Outcome
from mindspeed_cp.convert.rules.refused import OWN_ROWS, flag_of
from mindspeed_cp.refusals import ARGUMENT_RULES, MODEL_RULES, Rule

SHARED = (*MODEL_RULES, *ARGUMENT_RULES)

#: Other flags with which a setting is refused.
BESIDE = {
    "defer_embedding_wgrad_compute": ["--sequence-parallel"],
    "rotary_interleaved": ["--multi-latent-attention"],
    "no_rope_freq": ["--multi-latent-attention"],
    "qk_layernorm": ["--multi-latent-attention", "--q-lora-rank", "8", "--tensor-model-parallel-size", "2"],
    "moe_flex_dispatcher_backend": ["--num-experts", "8", "--moe-token-dispatcher-type", "flex"],
    "mlp_chunks_for_training": ["--num-experts", "8"],
    "mtp_use_repeated_layer": ["--mtp-num-layers", "2"],
    "moe_router_load_balancing_type": ["--num-experts", "8"],
}

#: A refused value of each setting that is no switch, and a valid one that a launch may give.
VALUES = {
    "experimental_attention_variant": ("dsa", None),
    "cuda_graph_impl": ("local", "none"),
    "gtp_weight_remat_size": ("2", "1"), "expert_gtp_weight_remat_size": ("2", "1"), "no_rope_freq": ("4", None),
    "moe_flex_dispatcher_backend": ("hybridep", "deepep"), "mlp_chunks_for_training": ("2", "1"),
    "moe_expert_capacity_factor": ("1.5", None), "moe_expert_rank_capacity_factor": ("2", None),
    "moe_router_load_balancing_type": ("aux_loss sinkhorn", "aux_loss seq_aux_loss"),
    "transformer_impl": ("inference_optimized", "local"), "heterogeneous_layers_config_path": ("x", None),
    "heterogeneous_layers_config_encoded_json": ("{}", None), "hybrid_attention_ratio": ("0.5", "0.0"),
    "hybrid_mlp_ratio": ("0.5", "0.0"), "hybrid_override_pattern": ("M*", None), "hybrid_layer_pattern": ("M*", None),
    "encoder_pipeline_model_parallel_size": ("1", "0"), "encoder_tensor_model_parallel_size": ("1", "0"),
    "pipeline_model_parallel_split_rank": ("1", None), "logits_load_dir": ("x", None), "logits_save_dir": ("x", None),
}  # fmt: skip


#: Settings that meet the conditions of all rules.
SETTINGS = dict(
    context_parallel_size=2, sequence_parallel=True, multi_latent_attention=True, q_lora_rank=8, num_moe_experts=8,
    tensor_model_parallel_size=2, moe_token_dispatcher_type="flex", expert_model_parallel_size=2,
)  # fmt: skip


def is_refused(setting: str, words: list[str], *beside: str) -> bool:
    """Convert a flag, and return True if it is refused; else it must stay as it is."""
    conversion = convert_flags(["--context-parallel-size", "8", *beside, flag_of(setting), *words])
    outcomes = {change.outcome for change in conversion.changes if change.flag.split()[0] == flag_of(setting)}
    assert outcomes <= {Outcome.REFUSED} or flag_of(setting) in conversion.kept
    return Outcome.REFUSED in outcomes


@pytest.mark.parametrize(
    "rule", [rule for rule in SHARED if rule.setting not in OWN_ROWS], ids=lambda rule: rule.setting
)
def test_a_conversion_refuses_what_a_start_refuses(rule: Rule) -> None:
    beside = BESIDE.get(rule.setting, [])
    refused, valid = VALUES.get(rule.setting, ("", None))
    assert (refused == "") == (rule.valid == "False"), "a value that is refused, or none for a switch"
    assert is_refused(rule.setting, refused.split(), *beside)
    if valid is not None:
        assert not is_refused(rule.setting, valid.split(), *beside)
    if beside:
        assert not is_refused(rule.setting, refused.split())


@pytest.mark.parametrize("setting", OWN_ROWS)
def test_other_settings_have_rows_of_their_own(setting: str) -> None:
    """Or they are left to the start, as `tokenizer_type`."""
    assert setting in {rule.setting for rule in SHARED}
    rows = [rule for rule in RULES if rule.flag == flag_of(setting)]
    added = setting in ("calculate_per_token_loss", "apply_rope_fusion", "create_attention_mask_in_dataloader",
                        "cp_plan_documents", "tokenizer_type")  # fmt: skip
    assert bool(rows) != added


def test_the_values_are_those_of_the_rules() -> None:
    assert {*VALUES, *BESIDE} <= {rule.setting for rule in SHARED}
    for rule in SHARED:
        if rule.setting in VALUES:
            words = VALUES[rule.setting][0].split()
            value = words if ARITIES[flag_of(rule.setting)] < 0 else words[0]
            number = value if isinstance(value, list) or not value.replace(".", "").isdigit() else float(value)
            settings = Namespace(**{**SETTINGS, rule.setting: number})
            assert rule.problem(settings) is not None, rule.setting
