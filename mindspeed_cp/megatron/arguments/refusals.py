"""ALL_RULES: what is refused of Megatron's arguments, and what to put on the command line in place of it."""

from __future__ import annotations

from mindspeed_cp.megatron.adaptors.rules import RULES
from mindspeed_cp.schema.unsupported import unsupported

#: All rules: of every name the table says "refused".
ALL_RULES = (*RULES, *unsupported("arguments"))

#: What to put on the command line, where the name of the argument does not say it.
FLAGS = {
    "calculate_per_token_loss": "--calculate-per-token-loss",
    "apply_rope_fusion": "--no-rope-fusion",
    "create_attention_mask_in_dataloader": "--no-create-attention-mask-in-dataloader",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type alltoall",
    "reset_attention_mask": "--reset-attention-mask and --reset-position-ids together, or neither",
}
