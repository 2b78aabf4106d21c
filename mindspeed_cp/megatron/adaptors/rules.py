"""RULES: what is refused of TransformerConfig in every Megatron, and in the one at hand."""

from __future__ import annotations

from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp.megatron.patches.multi_token import PACKED
from mindspeed_cp.refusals import MODEL_RULES, Rule, is_latent, is_split
from mindspeed_cp.refusals.rule import is_off


def _divides_losses(config: TransformerConfig) -> bool:
    """True if tokens are split and Megatron (before 0.16) has no place for PlannedRouter in the spec."""
    return is_split(config) and "router" not in MoESubmodules.__dataclass_fields__


def _interleaves_two_stages(config: TransformerConfig) -> bool:
    """True if each of two pipeline stages is both before and behind the other."""
    # Megatron's command line refuses batched messages there, its core does not: the first loss was 5.65689 in place of
    # 5.65594, on gloo and by Megatron's own code alone.
    return config.pipeline_model_parallel_size == 2 and (config.virtual_pipeline_model_parallel_size or 1) > 1


_DIVIDED_LOSS = "this Megatron-core divides it by the number of ranks; use megatron-core 0.16.1 or later"

RULES = (
    *MODEL_RULES,
    Rule(
        "mtp_num_layers",
        is_off,
        "None",
        "before 0.16 Megatron-core shifts tokens across the documents of a row; use megatron-core 0.16.1 or later",
        when=lambda config: not PACKED,
    ),
    Rule(
        "no_rope_freq",
        is_off,
        "None",
        "it has no entries for layers of multi-token prediction",
        when=lambda config: bool(getattr(config, "mtp_num_layers", None)),
    ),
    Rule(
        "mrope_section",
        lambda v: v is None,
        "None",
        "multi-latent attention has no positions of time, height and width",
        when=is_latent,
    ),
    Rule(
        "batch_p2p_comm",
        is_off,
        "False, with overlap_p2p_comm True",
        "two virtual stages of two ranks exchange activations and gradients in one list, and take one for the other",
        when=_interleaves_two_stages,
    ),
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
