"""Signals and a launcher that dies stop a run after its step."""

from __future__ import annotations

import os
import signal

import pytest

from mindspeed_cp.train.stop_request import StopRequest


def test_signals_are_remembered_and_the_second_interrupt_is_obeyed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_launcher_that_dies_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopRequest() as stop:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop.reason == "the death of the launcher"
