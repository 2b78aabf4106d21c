"""The limit of every wait in the tests, and the wait for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds that only a hang reaches, on the slowest and busiest machine: no test passes or fails by the clock.
HANG = 1200


def wait_until(condition: Callable[[], T], what: str, check: Callable[[], None] = lambda: None) -> T:
    """Poll until the condition holds, and return its value; call `check` between two polls, which may fail."""
    deadline = time.monotonic() + HANG
    while not (value := condition()):
        check()
        assert time.monotonic() < deadline, f"no {what} within {HANG} s"
        time.sleep(0.02)
    return value
