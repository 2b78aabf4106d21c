"""What must come of every input: a result or an error of one line, within 5 s of CPU time and 1 GB of memory.

    python -m tests.fuzz.contract FUZZER FIRST COUNT ...    inputs FIRST .. FIRST + COUNT - 1 of some fuzzers

prints the faults as JSON. An input is made from its fuzzer's name and its number alone.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import FrameType

SECONDS, BYTES = 5.0, 10**9
MESSAGE_CHARACTERS = 2000
ADDRESSES = 4 * 10**9  # a single allocation beyond this is refused by the system


class TooSlow(BaseException):
    """An input took more CPU time than any may take."""


def too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS:g} s")


def peak_memory() -> int:
    """Return the most bytes that this process has held; the system's ru_maxrss includes those of its parent."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def fault(name: str, number: int, folder: Path) -> str | None:
    """What is wrong with what comes of an input, or None."""
    from mindspeed_cp.errors import ConfigError, OperatorError, PeerError, PlanError
    from tests.fuzz.fuzzers import FUZZERS

    fuzzer = next(fuzzer for fuzzer in FUZZERS if fuzzer.__name__ == name)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        fuzzer(random.Random(f"{name} {number}"), folder)
    except (ConfigError, PlanError, PeerError, OperatorError) as error:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if len(str(error)) > MESSAGE_CHARACTERS:
            return f"a message of {len(str(error))} characters"
    except BaseException as error:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return "".join(traceback.format_exception(error)[-6:])[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if peak_memory() > BYTES:
        return "more than 1 GB"
    return None


def main(words: list[str]) -> None:
    """Give the inputs that the arguments name to their fuzzers."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGVTALRM, too_slow)
    warnings.simplefilter("ignore")  # NumPy's, of damaged numbers
    faults: dict[str, str] = {}
    done = 0
    for name, first, count in zip(words[::3], map(int, words[1::3]), map(int, words[2::3]), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            for number in range(first, first + count):
                wrong = fault(name, number, Path(folder))
                done += 1
                if wrong is not None:
                    faults[f"{name} {number}"] = wrong
                if sum(key.startswith(f"{name} ") for key in faults) == 3 or wrong == "more than 1 GB":
                    break
    print(json.dumps({"inputs": done, "faults": faults}))


if __name__ == "__main__":
    main(sys.argv[1:])
