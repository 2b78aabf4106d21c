"""mindspeed-cp doctor over the stand-in, with some of the long cases, of which most take seconds: the longest where the
operator has a fault. With --npu-profile there are no checks of the operator
but one, and the profile has the rows of variants and the quick ones of lowerings; otherwise the latter's first.
The doctor's processes are forked from one with all imports: each would take seconds to start.

DOCTOR_TYPES says in which types the rows of the profile run: see TYPES."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.npu.command import main

#: Rows of every variant: words in their names.
QUICK = ("ring of", "ALiBi", "equal lengths", "masks, short", "window, mean below 1,024", "mean below 1,024, D 128")

#: DOCTOR_TYPES -> whether a row runs in a type, by its place among those of its variant. "turns": each in fp32, the first in bf16
#: and the last in fp16, so that every variant runs in every type.
TYPES: dict[str, Callable[[str, int, int], bool]] = {
    "all": lambda dtype, number, last: True,
    "turns": lambda dtype, number, last: dtype == "fp32" or number == {"bf16": 0, "fp16": last}[dtype],
    "fp32": lambda dtype, number, last: dtype == "fp32",
}


def quick_rows(cases: Sequence) -> list:
    return [case for case in cases if any(word in case.case.name for word in QUICK)]


def calls_in_some_types(calls: Sequence, types: str) -> list:
    """Of the calls of capability_calls those that TYPES has. Variants under other lowerings or conditions are others."""
    names: dict[str, list[str]] = {}
    for case, dtype, _ in calls:
        if dtype == "fp32":
            names.setdefault(_variant(case), []).append(case.case.name)
    chosen = []
    for case, dtype, call in calls:
        rows = names[_variant(case)]
        if TYPES[types](dtype, rows.index(case.case.name), len(rows) - 1):
            chosen.append((case, dtype, call))
    return chosen


def _variant(case: Any) -> str:
    return repr((case.option, case.variant, case.lowering, case.condition))


def fork_processes() -> None:
    """Let the doctor's processes be forked, where it would start Python anew for each."""
    from mindspeed_cp.doctor import guarded

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.npu.preload", "mindspeed_cp.doctor"])
    guarded.mp = SimpleNamespace(get_context=lambda method: context)


if __name__ == "__main__":
    from mindspeed_cp import doctor

    fork_processes()
    if any(word.startswith("--npu-profile") for word in sys.argv):
        doctor.SHORT_CASES, doctor.LONG_CASES = doctor.SHORT_CASES[:1], ()
        rows = quick_rows(doctor.CAPABILITY_CASES)
    else:
        long_ones = doctor.LONG_CASES
        doctor.LONG_CASES = (*(case for case in long_ones[:2] if os.environ.get("HOST_CANN_FAULT")), *long_ones[-4:])
        rows = doctor.CAPABILITY_CASES[:1]
    capability_calls = doctor.capability_calls
    types = os.environ.get("DOCTOR_TYPES", "all")
    doctor.capability_calls = lambda seed, _: calls_in_some_types(capability_calls(seed, rows), types)
    main()
