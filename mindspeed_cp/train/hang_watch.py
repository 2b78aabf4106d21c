"""A step that hangs: every rank tells what it waits for and dumps its stacks before the time-out ends it."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from mindspeed_cp.comm.last_wait import describe_last_wait

SHARE = 0.8  # of context_parallel_suite.timeout_seconds


class HangWatch:
    """A thread that looks at how long a step takes; inside its context only.

    Args:
        rank: this rank.
        timeout: seconds after which a rank that waits for another fails.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout, self._limit = rank, timeout, SHARE * timeout
        self._began: tuple[int, float] | None = None  # the step, and when
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def __enter__(self) -> HangWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watch a step."""
        self._began = number, time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def _watch(self) -> None:
        told = None
        while not self._ended.wait(min(1.0, self._limit / 4)):
            began = self._began
            if began is None or began is told or time.monotonic() - began[1] < self._limit:
                continue
            told = began
            text = f"rank {self._rank}: step {began[0]} has taken more than {self._limit:g} s, and ranks that wait "
            text += f"{self._timeout:g} s for another end (context_parallel_suite.timeout_seconds)"
            print(f"{text}; {describe_last_wait()}; the stacks of all threads:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
