"""What becomes of each flag of Megatron and MindSpeed: one table, and what the conversion adds."""

from mindspeed_cp.convert.rules.attention import ATTENTION_RULES
from mindspeed_cp.convert.rules.documents import DOCUMENT_RULES
from mindspeed_cp.convert.rules.flag_rule import Added, FlagRule, Given, Outcome
from mindspeed_cp.convert.rules.mindspeed import MINDSPEED_FLAG_RULES
from mindspeed_cp.convert.rules.model import MODEL_RULES
from mindspeed_cp.convert.rules.parallel import ADDED_FLAGS, PARALLEL_RULES

#: All rules. The first that fits a flag, its value and the other flags is applied.
RULES = (*PARALLEL_RULES, *DOCUMENT_RULES, *ATTENTION_RULES, *MODEL_RULES, *MINDSPEED_FLAG_RULES)

#: Number of values of each flag of the table.
ARITIES = {rule.flag: rule.arity for rule in RULES}

__all__ = ["ADDED_FLAGS", "ARITIES", "RULES", "Added", "FlagRule", "Given", "Outcome"]
