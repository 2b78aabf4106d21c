"""`mindspeed-cp` over the stand-in, in processes that are forked with everything imported (tests/programs.py).

Such a process has another version of CANN than the tests only if Python is started anew: torch_npu reads it when it is imported.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback

from tests.processes import preload

preload("tests.npu.preload_training", "mindspeed_cp.doctor")

#: Rows of every variant of the npu backend: words in their names.
QUICK = ("ring of", "ALiBi", "equal lengths", "masks, short", "window, mean below 1,024", "mean below 1,024, D 128")


def command(words: list[str]) -> None:
    """The command line."""
    from mindspeed_cp.cli.main import run

    code = 1
    try:
        code = run(words)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: torch_npu's threads would wait for what failed


def short_doctor(words: list[str]) -> None:
    """The command line, whose doctor has the short cases and the quick rows of variants in fp32."""
    from mindspeed_cp import doctor

    rows = [row for row in doctor.capability_calls() if row[1] == "fp32" and any(word in row[2].kind for word in QUICK)]
    doctor.LONG_CASES = ()
    doctor.capability_calls = lambda: rows
    command(words)
