"""A request to stop by a signal, obeyed after the current step."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from mindspeed_cp.train.local_agent import asked_by, launcher_is_gone

LAUNCHER_DEATH = "the death of the launcher"


class Stopped(Exception):
    """A rank was asked to stop and cannot finish its step; carries one line."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP (a closed terminal) unless it is ignored, as by nohup."""
    always = (signal.SIGTERM, signal.SIGINT)
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)


class StopRequest:
    """Inside this context the signals of `stop_signals` (a second SIGINT aside) only set `reason`; main thread only."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._parent = os.getppid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """Source of the request, as in "stopped by ...", or None."""
        if self._reason is None and launcher_is_gone(self._parent):
            self._reason = LAUNCHER_DEATH
        if self._reason == signal.SIGTERM.name:  # as which the launcher hands on what it got
            self._reason = asked_by() or self._reason
        return self._reason

    @property
    def level(self) -> int:
        """0: no request; 1: a person or a program asked to stop; 2: the launcher of this rank was killed, a fault."""
        return 0 if self.reason is None else 2 if self.reason == LAUNCHER_DEATH else 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        gone = number == signal.SIGTERM and launcher_is_gone(self._parent)
        self._reason = LAUNCHER_DEATH if gone else signal.Signals(number).name
