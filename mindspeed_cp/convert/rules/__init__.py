"""What becomes of each flag of Megatron and MindSpeed: one table, and what the conversion adds."""

from pathlib import Path

import yaml

from mindspeed_cp.convert.rules.attention import ATTENTION_RULES
from mindspeed_cp.convert.rules.documents import DOCUMENT_RULES
from mindspeed_cp.convert.rules.flag_rule import Added, FlagRule, Given, Outcome
from mindspeed_cp.convert.rules.mindspeed import MINDSPEED_FLAG_RULES
from mindspeed_cp.convert.rules.mindspeed_flags import LLM_FLAGS, MINDSPEED_FLAGS
from mindspeed_cp.convert.rules.model import MODEL_RULES
from mindspeed_cp.convert.rules.parallel import ADDED_FLAGS, PARALLEL_RULES
from mindspeed_cp.convert.rules.refused import REFUSED_RULES

#: All rules. The first that fits a flag, its value and the other flags is applied.
RULES = (
    *PARALLEL_RULES,
    *DOCUMENT_RULES,
    *MINDSPEED_FLAG_RULES,
    *REFUSED_RULES,
    *ATTENTION_RULES,
    *MODEL_RULES,
)

#: Number of values of each flag of the table.
ARITIES = {rule.flag: rule.arity for rule in RULES}

_FLAGS = yaml.safe_load((Path(__file__).parent / "flags.yaml").read_text("utf-8"))

#: Flags without a row that change what the model computes -> why planned attention computes it, too.
MODEL_FLAGS = {f"--{name}": group["why"] for group in _FLAGS["model"] for name in group["flags"].split()}

#: Flags without a row that change neither the model nor its batches.
OTHER_FLAGS = frozenset(f"--{name}" for name in _FLAGS["other"].split()) | MINDSPEED_FLAGS | LLM_FLAGS

__all__ = [
    "ADDED_FLAGS",
    "ARITIES",
    "LLM_FLAGS",
    "MINDSPEED_FLAGS",
    "MODEL_FLAGS",
    "OTHER_FLAGS",
    "RULES",
    "Added",
    "FlagRule",
    "Given",
    "Outcome",
]
