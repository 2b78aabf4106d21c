"""A row that raises, hangs or ends its process is a failed row, and the others are measured."""

from __future__ import annotations

import os
import signal
import time

import pytest

from mindspeed_cp.doctor.guarded import Failure, GuardedCall, run_guarded
from tests.limits import HANG
from tests.processes import preload
from tests.programs import forked_processes

preload("pytest", "mindspeed_cp.doctor")


def nothing() -> None:
    pass


def broken_setup() -> None:
    raise OSError("no device")


def process_of(_: int) -> int:
    return os.getpid()


def raising(number: int) -> int:
    raise ValueError(f"row {number}\nis wrong")


def hanging(_: int) -> None:
    time.sleep(HANG)


def exiting(code: int) -> None:
    os._exit(code)


def killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are forked: a start of Python for each, as the first test has it, takes seconds."""
    monkeypatch.setattr("mindspeed_cp.doctor.guarded.mp", forked_processes())


def call(function: object, number: int = 0, kind: str = "") -> GuardedCall:
    return GuardedCall(function, (number,), kind or getattr(function, "__name__", ""))  # type: ignore[arg-type]


def test_results_are_in_order_and_an_error_is_a_row() -> None:
    results = run_guarded([call(process_of), call(raising, 7), call(process_of)], nothing, HANG)
    assert results[0] == results[2] != os.getpid()
    assert results[1] == Failure("ValueError: row 7 is wrong")


@pytest.mark.usefixtures("forks")
def test_a_call_that_is_lost_ends_its_process_alone() -> None:
    calls = [call(process_of), call(exiting, 3), call(process_of), call(killed), call(process_of)]
    results = run_guarded(calls, nothing, HANG)
    assert results[1] == Failure("ended its process with exit code 3")
    assert results[3] == Failure("ended its process by signal 11")
    assert len({results[number] for number in (0, 2, 4)}) == 3  # a new process after each


@pytest.mark.usefixtures("forks")
def test_a_call_that_hangs_is_ended_and_those_of_its_kind_are_not_made() -> None:
    calls = [call(hanging), call(process_of), call(hanging), call(process_of)]
    start = time.monotonic()
    results = run_guarded(calls, nothing, 3.0)
    assert results[0] == Failure("gave no result within 3 s")
    assert results[2] == Failure("was not made, since one of its kind gave no result within 3 s")
    assert results[1] == results[3] and time.monotonic() - start < HANG


@pytest.mark.usefixtures("forks")
def test_after_many_lost_calls_the_others_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_cp.doctor.guarded.MAX_LOST_CALLS", 1)
    results = run_guarded([call(exiting, 1, kind=str(number)) for number in range(4)], nothing, HANG)
    assert results[:2] == [Failure("ended its process with exit code 1")] * 2
    assert results[2:] == [Failure("was not made, after 2 that hung or crashed")] * 2


@pytest.mark.usefixtures("forks")
def test_a_process_that_cannot_start_fails_all_rows() -> None:
    assert run_guarded([call(process_of)] * 2, broken_setup, HANG) == [Failure("OSError: no device")] * 2
    assert run_guarded([], broken_setup, HANG) == []
