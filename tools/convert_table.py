"""The table of flags in docs/convert.md, from the rules of mindspeed_cp.convert."""

from __future__ import annotations

from mindspeed_cp.convert.flag_table import ADDED_FLAGS, RULES, SUITE_FILE, FlagRule, Outcome

FLAGS_HEAD = "| flag | for | becomes | why |\n|---|---|---|---|\n"
ADDED_HEAD = "| added | for | why |\n|---|---|---|\n"

_LABELS = {Outcome.REFUSED: "refused; instead: ", Outcome.BY_HAND: "stays; to do: "}


def flag_rows() -> str:
    """Return the rows of the table of flags; rows that differ by their flags alone are joined."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for rule in RULES:
        groups.setdefault((_cases(rule), _becomes(rule), rule.reason), []).append(f"`{rule.flag}`")
    return "".join(_row([", ".join(flags), cases, becomes, why]) for (cases, becomes, why), flags in groups.items())


def added_rows() -> str:
    """Return the rows of the table of added flags."""
    rows = ""
    for added in ADDED_FLAGS:
        flag = f"`{' '.join(added.words)}`".replace(SUITE_FILE, "suite.yaml")
        cases = added.when.text if added.when else ""
        rows += _row([flag, cases, added.reason + (f"; to do by hand: {added.by_hand}" if added.by_hand else "")])
    return rows


def _cases(rule: FlagRule) -> str:
    value = "" if rule.value is None else f"`{rule.value}`"
    return ", ".join(filter(None, (value, rule.when.text if rule.when else "")))


def _becomes(rule: FlagRule) -> str:
    settings = ", ".join(f"`{key}: {'...' if value is None else value}`" for key, value in rule.settings)
    if rule.outcome is Outcome.SETTING:
        return settings
    if rule.outcome is Outcome.STAYS_AS_SETTING:
        return f"{settings}, and stays"
    if rule.outcome is Outcome.REPLACED:
        return f"`{rule.flag} {rule.becomes}`"
    return f"{_LABELS.get(rule.outcome, rule.outcome.value)}{rule.becomes}"


def _row(cells: list[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells).replace("\n", " ") + "|\n"
