"""The tables of flags in docs/convert.md, from the rules of mindspeed_cp.convert."""

from __future__ import annotations

from mindspeed_cp.convert.flag_table import ADDED_FLAGS, RULES, SUITE_FILE, FlagRule, Outcome

FLAGS_HEAD = "| becomes | if | flags |\n|---|---|---|\n"
REFUSED_HEAD = "| refused; use instead | if | flags |\n|---|---|---|\n"
ADDED_HEAD = "| added | if |\n|---|---|\n"

_FLAGS_ORDER = (Outcome.STAYS_AS_SETTING, Outcome.SETTING, Outcome.REPLACED, Outcome.REMOVED, Outcome.STAYS)
_FLAGS_ORDER += (Outcome.BY_HAND,)


def flag_rows() -> str:
    """Return the rows of the table of flags that are not refused, in the order of their outcomes."""
    return "".join(_rows(outcome) for outcome in _FLAGS_ORDER)


def refused_rows() -> str:
    """Return the rows of the table of refused flags."""
    return _rows(Outcome.REFUSED)


def added_rows() -> str:
    """Return the rows of the table of added flags."""
    rows = ""
    for rule in ADDED_FLAGS:
        flag = f"`{rule.flag}{' ' + rule.value if rule.value else ''}`".replace(SUITE_FILE, "suite.yaml")
        rows += _row([flag, rule.when + (f"; to do by hand: {rule.becomes}" if rule.becomes else "")])
    return rows


def _rows(outcome: Outcome) -> str:
    """Return a row for what rules of an outcome make of flags, and for each of their conditions."""
    groups: dict[str, dict[str, list[str]]] = {}
    decided: set[str] = set()
    for rule in RULES:
        if rule.outcome is outcome:
            flag = f"`{rule.flag}`" if rule.value is None else f"`{rule.flag} {rule.value}`"
            flags = groups.setdefault(_becomes(rule), {}).setdefault(_condition(rule, decided), [])
            if flag not in flags:
                flags.append(flag)
        decided.add(rule.flag)
    return "".join(
        _row([becomes, condition, ", ".join(flags)])
        for becomes, conditions in groups.items()
        for condition, flags in conditions.items()
    )


def _condition(rule: FlagRule, decided: set[str]) -> str:
    """Return the condition of a rule; rules of flags that rules above it are for, too, are for all other cases."""
    if rule.when:
        return rule.when
    return "otherwise" if rule.value is None and rule.flag in decided else ""


def _becomes(rule: FlagRule) -> str:
    settings = ", ".join(f"`{key}: {'...' if value is None else value}`" for key, value in rule.settings)
    if rule.becomes.startswith("none: "):
        return "nothing: without the flag it is another model"
    return {
        Outcome.SETTING: settings,
        Outcome.STAYS_AS_SETTING: f"{settings}, and stays",
        Outcome.REPLACED: f"`{rule.flag} {rule.becomes}`",
        Outcome.BY_HAND: f"stays; to do: {rule.becomes}",
        Outcome.REFUSED: rule.becomes,
    }.get(rule.outcome, rule.outcome.value)


def _row(cells: list[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells).replace("\n", " ") + "|\n"
