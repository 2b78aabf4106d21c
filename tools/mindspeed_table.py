"""The tables of docs/mindspeed.md: what MindSpeed replaces near attention, and its arguments that are refused."""

from __future__ import annotations

from mindspeed_cp.megatron.mindspeed_compat import LINES, MINDSPEED_RULES, replacements

REPLACED_HEAD = "| attributes of Megatron | replaced for | lines | | why |\n|---|---|---|---|---|\n"
REFUSED_HEAD = "| argument | valid | why, or instead |\n|---|---|---|\n"


def replaced_rows() -> str:
    """Return the rows of the table of replaced attributes."""
    rows = ""
    for row in replacements():
        names = ", ".join(f"`{name.removeprefix('megatron.')}`" for name in row.names)
        lines = "all" if row.lines == LINES else ", ".join(row.lines)
        rows += f"| {names} | {row.flag} | {lines} | {row.verdict} | {row.reason} |\n"
    return rows


def refused_rows() -> str:
    """Return the rows of the table of refused arguments."""
    return "".join(f"| `{rule.setting}` | {rule.valid} | {rule.instead} |\n" for rule in MINDSPEED_RULES)
