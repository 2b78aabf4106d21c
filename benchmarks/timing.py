"""Timing one call in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_us(run: Callable[[], object], calls: int, warm_up: int = 1) -> float:
    """Median microseconds of a call, after `warm_up` calls that are not counted."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
