"""RULES: what is not supported of TransformerConfig in every Megatron and in the one at hand, and MindSpeed's part."""

from __future__ import annotations

from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp.megatron.beside_mindspeed.flags import MINDSPEED_CONDITIONS, MINDSPEED_RULES
from mindspeed_cp.megatron.patches.multi_token import PACKED
from mindspeed_cp.schema.unsupported import is_split, unsupported


def _divides_losses(config: TransformerConfig) -> bool:
    """True if tokens are split and Megatron (before 0.16) has no place for PlannedRouter in the spec."""
    return is_split(config) and "router" not in MoESubmodules.__dataclass_fields__


#: Conditions of rows that depend on the Megatron and the MindSpeed at hand.
CONDITIONS = {
    "Megatron-core before 0.16": lambda config: not PACKED,
    "split tokens, Megatron-core before 0.16": _divides_losses,
    **MINDSPEED_CONDITIONS,
}

RULES = (*unsupported("model"), *unsupported("this_megatron"))


def check_config(config: TransformerConfig) -> None:
    """Raise ConfigError if the config asks for what planned attention does not compute."""
    for rule in (*MINDSPEED_RULES, *RULES):
        rule.check(config, CONDITIONS)
