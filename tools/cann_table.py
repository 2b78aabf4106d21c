"""The tables of CANN's rules in docs/ascend.md, from the checker of the stand-in; written by `make docs-tables`."""

from __future__ import annotations

from tests.host_cann.cann_rules import OPERATORS, SOURCES, Rule

#: What CANN does -> the word in the table.
_EFFECTS = {"refused": "error", "ignored": "ignores it", "undefined": "undefined"}

SOURCES_HEAD = "| source of a rule | where it is |\n|---|---|\n"


def rules_head(operator: str) -> str:
    """Return the head of the table of an operator's rules."""
    return f"| rule of {operator} | if broken | source | how the package keeps it |\n|---|---|---|---|\n"


def rules_rows(operator: str) -> str:
    """Return the rows of the table of an operator's rules."""
    return "".join(_row(rule) for rules in OPERATORS[operator] for rule in rules)


def sources_rows() -> str:
    """Return the rows of the table of sources."""
    return "".join(f"| `{name}` | {path} |\n" for name, path in SOURCES.items())


def rules_page(page: str) -> str:
    """Return docs/ascend.md with the tables of rules and sources."""
    tables = {rules_head(operator): rules_rows(operator) for operator in OPERATORS}
    for head, rows in (tables | {SOURCES_HEAD: sources_rows()}).items():
        start = page.index(head)
        page = page[:start] + head + rows + page[page.index("\n\n", start) + 1 :]
    return page


def _row(rule: Rule) -> str:
    file, _, function = rule.source.partition(": ")
    cells = (f"`{rule.name}`: {rule.text}", _EFFECTS[rule.effect], f"`{file}`: {function}", rule.kept)
    return "".join(f"| {cell.replace('|', '/')} " for cell in cells) + "|\n"
