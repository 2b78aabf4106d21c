"""ENTRIES: all rows of the table of Megatron's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindspeed_cp.megatron.arguments.entry import Entry, Verdict, read_entries, read_span
from mindspeed_cp.megatron.arguments.harmless_groups import HARMLESS_GROUPS
from mindspeed_cp.megatron.arguments.harmless_model import HARMLESS_MODEL
from mindspeed_cp.megatron.arguments.harmless_training import HARMLESS_TRAINING
from mindspeed_cp.megatron.arguments.refusals import ALL_RULES
from mindspeed_cp.megatron.arguments.refused import COMM_TYPE_REASON, REFUSED_SPANS
from mindspeed_cp.megatron.arguments.used import USED

#: Arguments of this package, which rules of Megatron's arguments refuse, too.
OWN_ARGUMENTS = ("cp_plan_documents",)


def _entries() -> Iterator[Entry]:
    problems: dict[str, list[str]] = {"cp_comm_type": [COMM_TYPE_REASON]}
    for rule in ALL_RULES:
        if rule.setting not in OWN_ARGUMENTS:
            case = f"with {rule.when}, " if rule.when else ""
            problems.setdefault(rule.setting, []).append(f"{case}valid: {rule.valid} ({rule.instead})")
    tables: tuple[tuple[Verdict, dict[str, str]], ...]
    tables = ("used", USED), *(("harmless", table) for table in (HARMLESS_MODEL, HARMLESS_TRAINING, HARMLESS_GROUPS))
    for verdict, table in tables:
        for entry in read_entries(verdict, table):
            texts = problems.pop(entry.name, [])
            yield replace(entry, reason="; in some models ".join([entry.reason, *texts]))
    for name, texts in problems.items():
        yield Entry(name, read_span(REFUSED_SPANS.get(name, "")), "refused", "; ".join(dict.fromkeys(texts)))


#: Every argument, in the order used, harmless, refused.
ENTRIES: tuple[Entry, ...] = tuple(_entries())


def entry_of(name: str) -> Entry | None:
    """Return the entry of an argument or field; None if the table has none."""
    return next((entry for entry in ENTRIES if entry.name == name), None)
