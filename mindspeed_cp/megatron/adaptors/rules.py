"""RULES: what is refused of TransformerConfig in every Megatron, and in the one at hand."""

from __future__ import annotations

from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp.refusals import MODEL_RULES, Rule, is_split
from mindspeed_cp.refusals.rule import is_off


def _divides_losses(config: TransformerConfig) -> bool:
    """True if tokens are split and Megatron (before 0.16) has no place for PlannedRouter in the spec."""
    return is_split(config) and "router" not in MoESubmodules.__dataclass_fields__


_DIVIDED_LOSS = "this Megatron-core divides it by the number of ranks; use megatron-core 0.16.1 or later"

RULES = (
    *MODEL_RULES,
    Rule(
        "moe_router_enable_expert_bias",
        is_off,
        "False",
        "this Megatron-core would count rows of padding, which a rank without tokens has; use megatron-core 0.16.1 or "
        "later",
        when=_divides_losses,
    ),
    Rule("moe_aux_loss_coeff", is_off, "0.0", _DIVIDED_LOSS, when=_divides_losses),
    Rule("moe_z_loss_coeff", is_off, "None", _DIVIDED_LOSS, when=_divides_losses),
)
