"""mindspeed-cp doctor over the stand-in, with some of the long cases, of which most take seconds: the longest where the
operator has a fault. The links are timed with messages of 1 MB. With --npu-profile there are no checks of the operator
but one, and the profile has the rows of variants and the quick ones of lowerings; otherwise the latter's first."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tests.npu.command import main

#: Rows of every variant: words in their names.
QUICK = ("ring of", "ALiBi", "equal lengths", "masks, short", "window, mean below 1,024", "mean below 1,024, D 128")


def quick_habits(cases: Sequence) -> list:
    return [case for case in cases if any(word in case.case.name for word in QUICK)]


if __name__ == "__main__":
    from functools import partial

    from mindspeed_cp import doctor
    from mindspeed_cp.doctor.habit_cases import HABIT_CASES

    if any(word.startswith("--npu-profile") for word in sys.argv):
        doctor.SHORT_CASES, doctor.LONG_CASES = doctor.SHORT_CASES[:1], ()
        habits = quick_habits(HABIT_CASES)
    else:
        long_ones = doctor.LONG_CASES
        doctor.LONG_CASES = (*(case for case in long_ones[:2] if os.environ.get("HOST_CANN_FAULT")), *long_ones[-4:])
        habits = HABIT_CASES[:1]
    check_npu, check_links = doctor.check_npu, doctor.check_links
    doctor.check_npu = lambda cases, seed, seconds, _: partial(check_npu, habits=habits)(cases, seed, seconds)
    doctor.check_links = lambda devices, megabytes, seconds: check_links(devices, 1, seconds)
    main()
