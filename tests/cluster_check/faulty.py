"""Measurements with faults, for workers without torch."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tests.limits import HANG

MEASUREMENTS = {"fault": ("tests.cluster_check.faulty", "measure")}


class Context:
    """What the measurements of a worker share."""

    def __init__(self, rank: int, generation: int) -> None:
        self.rank, self.generation = rank, generation
        self.sign: Any = None


class WaitedError(RuntimeError):
    """Waited for all others in vain."""

    waited_for_all = True


def measure(context: Context, item: dict[str, Any]) -> dict[str, Any]:
    """Do what an item has for this rank: nothing, raise, die, hang, or wait in vain; return rank and generation."""
    fault = item.get(str(context.rank))
    if fault == "raise":
        raise ValueError("a bad\n cable")
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(HANG)
    if fault == "wait":
        raise WaitedError("waited for all ranks")
    return {"rank": context.rank, "generation": context.generation}
