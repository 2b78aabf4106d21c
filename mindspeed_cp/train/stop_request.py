"""A request to stop by a signal, obeyed after the current step."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

LAUNCHER_DEATH = "the death of the launcher"


class Stopped(Exception):
    """A rank was asked to stop and cannot finish its step; carries one line."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP (a closed terminal) unless it is ignored, as by nohup."""
    always = (signal.SIGTERM, signal.SIGINT)
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)


class StopRequest:
    """Inside this context the signals of `stop_signals` only set `reason`; main thread only."""

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
        if os.getppid() != self._parent:  # torch has the system send SIGINT then, other launchers nothing
            self._reason = LAUNCHER_DEATH
        return self._reason

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._reason = self._reason or signal.Signals(number).name
