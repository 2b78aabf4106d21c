"""Calls in a process of their own, so that one that hangs or crashes is a failed row and not the end of the doctor."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

#: Default limit of a row in seconds. On devices a row takes milliseconds; the first loads kernels.
ROW_SECONDS = 60.0

#: Limit in seconds of the start of a process, which imports torch and loads the device's libraries.
START_SECONDS = 300.0

#: Calls that may hang or crash before the others are given up.
MAX_LOST_CALLS = 8


@dataclass(frozen=True)
class GuardedCall:
    """A call for the process.

    Attributes:
        function: a function of a module.
        arguments: its arguments, which can be pickled.
        kind: calls of one kind are alike: where one hangs or crashes, the later ones are not made.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    kind: str


@dataclass(frozen=True)
class Failure:
    """A call without a result, and why."""

    error: str


def run_guarded(
    calls: Sequence[GuardedCall], setup: Callable[[], object], limit: float = ROW_SECONDS
) -> list[Any | Failure]:
    """Make the calls one after the other in a spawned process, and in a new one after each that hung or crashed.

    Args:
        calls: the calls.
        setup: called first in every process; a function of a module.
        limit: seconds that a call may take.

    Returns:
        The result of each call, or a Failure: what it raised, or that it gave no result within the limit, ended its
        process, or was not made because one of its kind did.
    """
    results: list[Any | Failure] = [Failure("was not made")] * len(calls)
    lost: dict[str, str] = {}
    pending = list(range(len(calls)))
    while pending:
        skipped = [number for number in pending if calls[number].kind in lost]
        for number in skipped:
            results[number] = Failure(f"was not made, since one of its kind {lost[calls[number].kind]}")
        pending = [number for number in pending if number not in skipped]
        if not pending:
            break
        if len(lost) > MAX_LOST_CALLS:
            return [
                Failure(f"was not made, after {len(lost)} that hung or crashed") if number in pending else result
                for number, result in enumerate(results)
            ]
        end = _serve_process([calls[number] for number in pending], setup, limit, results, pending)
        if end is None:
            return results
        count, error = end
        if count < 0:  # not even the start
            return [Failure(error) if number in pending else result for number, result in enumerate(results)]
        results[pending[count]] = Failure(error)
        lost[calls[pending[count]].kind] = error
        pending = pending[count + 1 :]
    return results


def _serve_process(
    calls: Sequence[GuardedCall], setup: Callable[[], object], limit: float, results: list[Any], numbers: list[int]
) -> tuple[int, str] | None:
    """Make calls in one process and write their results. Returns None, or the index of the call that got lost and why;
    -1: the start."""
    context = mp.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    process = context.Process(target=_make_calls, args=(child_pipe, calls, setup), daemon=True)
    process.start()
    child_pipe.close()
    try:
        for index in range(-1, len(calls)):
            seconds = START_SECONDS if index < 0 else limit
            if not pipe.poll(seconds):
                return index, f"gave no result within {seconds:g} s"
            try:
                result = pipe.recv()
            except EOFError:
                return index, _describe_end(process)
            if index >= 0:
                results[numbers[index]] = result
            elif isinstance(result, Failure):
                return index, result.error
        return None
    finally:
        process.kill()
        process.join()


def _make_calls(pipe: Connection, calls: Sequence[GuardedCall], setup: Callable[[], object]) -> None:
    pipe.send(_result(setup))
    for call in calls:
        pipe.send(_result(call.function, *call.arguments))


def _result(function: Callable[..., Any], *arguments: Any) -> Any | Failure:
    try:
        return function(*arguments)
    except Exception as error:  # of any type: the other calls must still be made
        return Failure(" ".join(f"{type(error).__name__}: {error}".split())[:300])


def _describe_end(process: BaseProcess) -> str:
    process.join()
    code = process.exitcode or 0
    return f"ended its process by signal {-code}" if code < 0 else f"ended its process with exit code {code}"
