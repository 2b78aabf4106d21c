"""The page of CANN's rules, tests/host_cann/rules.md, from the checker of the stand-in."""

from __future__ import annotations

from tests.host_cann.cann_rule import SOURCES, Rule
from tests.host_cann.cann_rules import OPERATORS

#: What CANN does -> the word in the table.
_EFFECTS = {"refused": "error", "undefined": "undefined"}

HEAD = """<!-- make docs-tables -->
# CANN's rules

What CANN's operators take, for Atlas A2 and A3, as read in its public sources and documents; no device has answered.
`cann_rules.py` checks every call of attention, of the ring update and of HcclBatchSendRecv that reaches the stand-in.
What the package does not use of them (other layouts, sparse modes with prefixes, external biases) the stand-in does not
model: it is refused before these rules. They know neither the lowering nor the oracle. `tests/ops/test_cann_rules.py`
breaks each rule alone, and `tests/ops/test_cann_rules_random.py` gives them the calls of random plans.

*If broken*: CANN returns an error, or computes something undefined. The stand-in refuses both; the package's own calls
break no rule. What a document alone says (a source that ends in `.md`, and the page of HcclBatchSendRecv) CANN's code
may not check. Other releases may have other rules: look into the functions named here.
"""
RULES_HEAD = "| rule | if broken | source | how the package keeps it |\n|---|---|---|---|\n"
SOURCES_HEAD = "| source | where it is |\n|---|---|\n"


def rules_page() -> str:
    """Return tests/host_cann/rules.md."""
    text = HEAD
    for operator, rules in OPERATORS.items():
        text += f"\n## {operator}\n\n{RULES_HEAD}" + "".join(map(_row, rules))
    return f"{text}\n## Sources\n\n{SOURCES_HEAD}" + "".join(f"| `{x}` | {path} |\n" for x, path in SOURCES.items())


def _row(rule: Rule) -> str:
    file, _, function = rule.source.partition(": ")
    cells = (f"`{rule.name}`: {rule.text}", _EFFECTS[rule.effect], f"`{file}`: {function}", rule.kept)
    return "".join(f"| {cell.replace('|', '/')} " for cell in cells) + "|\n"
