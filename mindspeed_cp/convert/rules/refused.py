"""Flags that Megatron's start would refuse: the rules of mindspeed_cp.refusals, applied to the words of a launch."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

from mindspeed_cp.convert.command_line import MANY
from mindspeed_cp.convert.rules.flag_rule import ANOTHER_MODEL, Condition, FlagRule, Given, Outcome
from mindspeed_cp.refusals import ARGUMENT_RULES, MODEL_RULES, Rule

#: Settings with rows of their own, or an added flag, in place of a refusal -> what a conversion does.
OWN_ROWS = {
    "calculate_per_token_loss": "adds the flag",
    "apply_rope_fusion": "adds --no-rope-fusion",
    "create_attention_mask_in_dataloader": "adds --no-create-attention-mask-in-dataloader",
    "reset_attention_mask": "adds --reset-position-ids, and --cp-plan-documents beside MindSpeed",
    "cp_plan_documents": "adds it with --reset-position-ids",
    "moe_token_dispatcher_type": "gives alltoall",
    "attention_backend": "leaves the flag out",
    "position_embedding_type": "gives none for alibi; the others have an alternative",
    "hybrid_context_parallel": "has a setting as alternative",
    "dynamic_context_parallel": "has a setting as alternative",
    "hierarchical_context_parallel_sizes": "makes it a setting",
    "max_seqlen_per_dp_cp_rank": "makes it a setting",
    "tokenizer_type": "knows neither the data nor the version of Megatron, on which the refusal depends",
}

#: Settings that change what the model computes, or its loss: left out, they would give another model.
CHANGES_MODEL = frozenset(
    {
        *("qk_clip", "experimental_attention_variant", "is_hybrid_model", "hybrid_override_pattern", "no_rope_freq"),
        *("hybrid_layer_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio", "heterogeneous_block_specs"),
        *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "rotary_interleaved"),
        *("qk_layernorm", "mtp_use_repeated_layer", "moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"),
        *("moe_router_load_balancing_type", "moe_enable_routing_replay", "logits_load_dir", "perform_rl_step"),
        *("encoder_pipeline_model_parallel_size", "pipeline_model_parallel_split_rank"),
    }
)

#: Settings whose flags take several values.
_LISTS = frozenset({"moe_router_load_balancing_type"})

#: Setting that a rule's condition reads -> its flag, and Megatron's default.
_NUMBERS = {
    "context_parallel_size": ("--context-parallel-size", 1),
    "tensor_model_parallel_size": ("--tensor-model-parallel-size", 1),
    "expert_model_parallel_size": ("--expert-model-parallel-size", 1),
    "num_moe_experts": ("--num-experts", 0),
    "mtp_num_layers": ("--mtp-num-layers", 0),
}
_SWITCHES = {
    "sequence_parallel": "--sequence-parallel",
    "multi_latent_attention": "--multi-latent-attention",
    "moe_hybridep_pad_uneven_dispatch_inputs": "--moe-hybridep-pad-uneven-dispatch-inputs",
}

#: Valid values that a flag which is left out has.
_DEFAULTS = frozenset({"False", "None", "0", "0.0", "1"})


def flag_of(setting: str) -> str:
    """Return the flag of a setting of Megatron."""
    return "--" + setting.replace("_", "-")


def _settings(given: Given) -> dict[str, Any]:
    """Return the settings that conditions read; a number that is not known is Megatron's default."""
    numbers = {name: given.number(flag, default) or default for name, (flag, default) in _NUMBERS.items()}
    switches = {name: given.has(flag) for name, flag in _SWITCHES.items()}
    return {
        **numbers,
        **switches,
        "q_lora_rank": given.value("--q-lora-rank") or None,
        "moe_token_dispatcher_type": given.value("--moe-token-dispatcher-type", "allgather"),
        "attention_dropout": _number(given.value("--attention-dropout", "0.1")),
    }


def _read_value(values: tuple[str, ...]) -> Any:
    """Return the value of a flag as Megatron's parser reads it: True without a value, numbers as such."""
    if not values:
        return True
    words = [_number(text) for text in values]
    return words[0] if len(words) == 1 else words


def _number(text: str) -> int | float | str:
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    is_number = re.fullmatch(r"-?([0-9]{1,18}\.?[0-9]{0,18}|\.[0-9]{1,18})([eE][-+]?[0-9]{1,3})?", text)
    return float(text) if is_number else text


def _flag_rule(rule: Rule) -> FlagRule:
    is_switch = rule.valid in ("False", "True")
    flag = flag_of(rule.setting)

    def refuses(given: Given) -> bool:
        value = _read_value(given.values[flag]) if given.has(flag) else None
        return given.has(flag) and rule.problem(Namespace(**_settings(given) | {rule.setting: value})) is not None

    valid = rule.valid.replace("'", "")
    other = "" if is_switch or valid == "None" else f"other than {valid}"
    words = ", ".join(filter(None, (other, rule.case)))
    return FlagRule(
        flag,
        0 if is_switch else MANY if rule.setting in _LISTS else 1,
        Outcome.REFUSED,
        rule.instead,
        becomes=ANOTHER_MODEL
        if rule.setting in CHANGES_MODEL
        else "leave the flag out"
        if valid in _DEFAULTS
        else valid,
        when=Condition(words, refuses) if words or not is_switch else None,
    )


#: A row for each rule whose setting has no rows of its own.
REFUSED_RULES = tuple(_flag_rule(rule) for rule in (*MODEL_RULES, *ARGUMENT_RULES) if rule.setting not in OWN_ROWS)
