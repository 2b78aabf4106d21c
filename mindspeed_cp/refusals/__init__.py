"""Values of Megatron's settings that planned attention refuses: one table, without torch or Megatron.

:data:`MODEL_RULES` are of fields of TransformerConfig, :data:`ARGUMENT_RULES` of arguments that it does not have. The
rules are checked where Megatron starts (:mod:`mindspeed_cp.megatron.arguments`) and where a model is built
(:mod:`mindspeed_cp.megatron.adaptors.settings`), and `mindspeed-cp convert` applies them to the flags of a launch.
"""

from mindspeed_cp.refusals.arguments import ARGUMENT_RULES
from mindspeed_cp.refusals.model import MODEL_RULES
from mindspeed_cp.refusals.rule import Rule, is_latent, is_split

__all__ = ["ARGUMENT_RULES", "MODEL_RULES", "Rule", "is_latent", "is_split"]
