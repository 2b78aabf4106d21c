"""What becomes of each flag of Megatron and MindSpeed: one table, and what the conversion adds."""

from mindspeed_cp.convert.rules.attention import ATTENTION_RULES
from mindspeed_cp.convert.rules.documents import DOCUMENT_RULES
from mindspeed_cp.convert.rules.flag_rule import Added, FlagRule, Given, Outcome
from mindspeed_cp.convert.rules.mindspeed import MINDSPEED_FLAG_RULES
from mindspeed_cp.convert.rules.mindspeed_flags import LLM_FLAGS, MINDSPEED_FLAGS
from mindspeed_cp.convert.rules.model import MODEL_RULES
from mindspeed_cp.convert.rules.parallel import ADDED_FLAGS, PARALLEL_RULES
from mindspeed_cp.convert.rules.refused import READ_FLAGS, REFUSED_RULES

#: All rules. The first that fits a flag, its value and the other flags is applied.
RULES = (
    *PARALLEL_RULES,
    *DOCUMENT_RULES,
    *REFUSED_RULES,
    *ATTENTION_RULES,
    *MODEL_RULES,
    *MINDSPEED_FLAG_RULES,
)

#: Number of values of each flag of the table.
ARITIES = {rule.flag: rule.arity for rule in RULES}

#: Flags that a condition of some row reads, beside those by which MindSpeed is known.
CONDITION_FLAGS = READ_FLAGS | {
    *("--context-parallel-algo", "--cp-comm-type", "--cp-window-size", "--position-embedding-type"),
    *("--use-rotary-position-embeddings", "--seq-length", "--pre-tockens", "--spec", "--pipeline-model-parallel-size"),
    *("--reset-attention-mask", "--reset-position-ids", "--dataloader-inter-document-masking", "--cp-plan-documents"),
    *("--is-instruction-dataset", "--pack", "--neat-pack", "--kv-channels", "--moe-aux-loss-coeff"),
}

__all__ = [
    "ADDED_FLAGS",
    "ARITIES",
    "CONDITION_FLAGS",
    "LLM_FLAGS",
    "MINDSPEED_FLAGS",
    "RULES",
    "Added",
    "FlagRule",
    "Given",
    "Outcome",
]
