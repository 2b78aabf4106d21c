"""The table of the rows of `mindspeed-cp doctor --npu-profile`: for docs/ascend.md."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_cp.device.npu_profile import Condition
from mindspeed_cp.doctor.cann_templates import SOURCES, CallShape, forward_template, gradient_template
from mindspeed_cp.doctor.habit_cases import HABIT_CASES, HabitCase
from tests.doctor.habit_calls import calls_of

HEAD = (
    "| row | variant | counts for | forward, bf16 and fp16 | gradient, bf16 and fp16 | gradient, fp32 |\n"
    "|---|---|---|---|---|---|\n"
)


def rows_page(page: str) -> str:
    """Return docs/ascend.md with a row for each shape and variant."""
    start = page.index(HEAD)
    end = page.index("\n\n", start) + 1
    return page[:start] + HEAD + "".join(map(_row, HABIT_CASES)) + page[end:]


def _row(case: HabitCase) -> str:
    half, single = calls_of(case, "bf16"), calls_of(case, "fp32")
    cells = [
        case.case.name,
        f"`npu_{case.option}: {case.variant}`",
        _attention(case.condition),
        _templates(half, forward_template),
        _templates(half, gradient_template),
        _templates(single, gradient_template),
    ]
    return f"| {' | '.join(cells)} |\n"


def _attention(condition: Condition) -> str:
    parts = [word for word in ("alibi", "window", "deterministic") if getattr(condition, word)]
    if condition.widths is not None:
        parts.append("heads of " + " and ".join(map(str, dict.fromkeys(condition.widths))))
    if condition.min_group > 1:
        parts.append(f"{condition.min_group} query heads or more for a key head")
    return ", ".join(parts).replace("alibi", "ALiBi") or "all"


def _templates(calls: tuple[CallShape, ...], template: Callable[[CallShape, str], str]) -> str:
    names: dict[str, None] = {}
    for call in calls:
        by_source = dict.fromkeys(template(call, source) for source in SOURCES)
        names[" or ".join(by_source)] = None
    return ", ".join(names)
