"""Which rank is slower than the others, although all of them end every step together.

The time of a step says nothing: ranks wait for the slowest one in every collective. The time that a rank computes in a
step does not either, because packed rows give ranks different work. So every rank multiplies the same two matrices
before each step, without a message, and the times of all ranks travel with the loss. The matrices are small: what a
step pays for them is far less than a thousandth on any device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mindspeed_cp.schema.messages import name_ranks

_SIZES = {"cpu": (192, torch.float32)}  # rows, type: about 0.2 ms
#: 2.1 GFLOP: below 0.1 ms at 30 TFLOP/s. Not bf16, which a CPU under the stand-in for CANN may emulate: 60 s a step.
_DEVICE_SIZE = (1024, torch.float32)


class ComputeProbe:
    """Times a fixed multiplication on the device of this rank; on a device, no host waits for it."""

    def __init__(self, device: torch.device) -> None:
        rows, dtype = _SIZES.get(device.type, _DEVICE_SIZE)
        self._a = torch.ones(rows, rows, dtype=dtype, device=device)
        self._out = torch.empty_like(self._a)
        self._event_type = None if device.type == "cpu" else torch.get_device_module(device).Event
        self._marks: tuple[Any, Any] | None = None

    def seconds(self) -> float:
        """Return the time of the multiplication before, and start another; 0 at the first call."""
        before, self._marks = self._marks, None
        begin = self._mark()
        torch.mm(self._a, self._a, out=self._out)
        self._marks = begin, self._mark()
        if self._event_type is None:
            return float(self._marks[1] - self._marks[0])
        if before is None:
            return 0.0
        before[1].synchronize()  # of the step before: it has ended
        return float(before[0].elapsed_time(before[1])) / 1e3

    def _mark(self) -> Any:
        if self._event_type is None:
            return time.perf_counter()
        event = self._event_type(enable_timing=True)
        event.record()
        return event


class StragglerWatch:
    """Names a rank once that is slower than the others in many steps in a row.

    Slower means: than the median of the faster half of the ranks, by more than `deviations` times the median absolute
    deviation of that half, and by more than `least`. Thus half of the ranks may be slow, such as one node of two.

    Args:
        deviations: how many median absolute deviations above the median.
        steps: in so many steps in a row.
        least: share of the median, for ranks that are all alike.
    """

    def __init__(self, deviations: float = 6.0, steps: int = 50, least: float = 0.2) -> None:
        self._deviations, self._steps, self._least = deviations, steps, least
        self._counts = np.zeros(0, dtype=int)
        self._named: set[int] = set()

    def add(self, seconds: Sequence[float]) -> str | None:
        """Take the times of all ranks in a step; return a line that names new slow ranks, or None.

        Args:
            seconds: one for each rank.
        """
        times = np.asarray(seconds, dtype=float)
        if len(self._counts) != len(times):
            self._counts = np.zeros(len(times), dtype=int)
        faster = np.sort(times)[: (len(times) + 1) // 2]
        middle = float(np.median(faster))
        spread = float(np.median(np.abs(faster - middle)))
        limit = middle + max(self._deviations * spread, self._least * middle)
        self._counts = np.where(times > limit, self._counts + 1, 0)
        new = [int(rank) for rank in np.flatnonzero(self._counts >= self._steps) if rank not in self._named]
        if not new:
            return None
        self._named.update(new)
        slower = ", ".join(f"{times[rank] / middle:.1f}" for rank in new)
        return (
            f"{name_ranks(new, 'is', 'are')} slow: "
            f"the same multiplication has taken longer than on the other ranks in {self._steps} steps in "
            f"a row, {slower} times the median of the faster half in this one; look for other processes, heat, or a "
            "failing device there"
        )
