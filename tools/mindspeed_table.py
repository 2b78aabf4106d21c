"""The tables of docs/mindspeed.md: what MindSpeed replaces near attention, and its arguments that are refused."""

from __future__ import annotations

import re

from mindspeed_cp.megatron.mindspeed_compat import MINDSPEED_RULES, replacements

REPLACED_HEAD = "| attributes of Megatron | | why, or with which flags |\n|---|---|---|\n"
REFUSED_HEAD = "| argument | valid | why, or instead |\n|---|---|---|\n"


def replaced_rows() -> str:
    """Return the rows of the table of replaced attributes: one for each verdict and reason, or set of refused flags."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in replacements():
        works = row.verdict in ("kept", "unused")
        why = row.reason if works else re.sub(r" \(pass [^)]*\)", "", row.flag)
        names = groups.setdefault((row.verdict if works else "error", why), [])
        names += [f"`{_short_name(name)}`" for name in row.names]
    return "".join(
        f"| {', '.join(dict.fromkeys(names))} | {verdict} | {why} |\n" for (verdict, why), names in groups.items()
    )


def refused_rows() -> str:
    """Return the rows of the table of refused arguments; those that are refused alike are joined."""
    groups: dict[tuple[str, str], list[str]] = {}
    for rule in MINDSPEED_RULES:
        groups.setdefault((rule.valid, rule.instead), []).append(f"`{rule.setting}`")
    return "".join(f"| {', '.join(names)} | {valid} | {why} |\n" for (valid, why), names in groups.items())


def _short_name(name: str) -> str:
    """Return Class.method, a class, or module.function of a dotted name."""
    *_, owner, last = name.split(".")
    return last if last[0].isupper() else f"{owner}.{last}"
