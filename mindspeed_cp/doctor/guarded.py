"""Calls in a process of their own, so that one that hangs or crashes is a failed row and not the end of the doctor."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

#: Default limit of a row in seconds. On devices a row takes milliseconds; the first loads kernels.
ROW_SECONDS = 120.0

#: Limit in seconds of the start of a process, which imports torch and loads the device's libraries.
START_SECONDS = 300.0

#: Calls that may hang or crash before the others are given up.
MAX_LOST_CALLS = 8


class GuardedCall(NamedTuple):
    """A function of a module, and its arguments, for the process; calls of one kind are alike: where one hangs or
    crashes, the later ones are not made."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    kind: str


@dataclass(frozen=True)
class Failure:
    """A call without a result, and why; `lost`: it hung or ended its process."""

    error: str
    lost: bool = field(default=False, compare=False)


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
    results: dict[int, Any] = {}
    lost: dict[str, str] = {}
    while len(lost) <= MAX_LOST_CALLS:
        pending = {n: call for n, call in enumerate(calls) if n not in results and call.kind not in lost}
        if not pending:
            break
        start, *received = _results_of_process(list(pending.values()), setup, limit)
        if isinstance(start, Failure):
            return [results.get(n, start) for n in range(len(calls))]
        results.update(zip(pending, received, strict=False))
        if isinstance(received[-1], Failure) and received[-1].lost:
            lost[list(pending.values())[len(received) - 1].kind] = received[-1].error
    reasons = {kind: Failure(f"was not made, since one of its kind {end}") for kind, end in lost.items()}
    given_up = Failure(f"was not made, after {len(lost)} that hung or crashed")
    return [results.get(n, reasons.get(call.kind, given_up)) for n, call in enumerate(calls)]


def _results_of_process(calls: Sequence[GuardedCall], setup: Callable[[], object], limit: float) -> list[Any]:
    """Return the results of the setup and of the calls in one process, up to the first that got lost."""
    context = mp.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    process = context.Process(target=_make_calls, args=(child_pipe, calls, setup), daemon=True)
    process.start()
    child_pipe.close()
    results: list[Any] = []
    try:
        while len(results) <= len(calls):
            seconds = limit if results else START_SECONDS
            if not pipe.poll(seconds):
                return [*results, Failure(f"gave no result within {seconds:g} s", lost=True)]
            results.append(pipe.recv())
        return results
    except EOFError:
        process.join()
        code = process.exitcode or 0
        end = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return [*results, Failure(f"ended its process {end}", lost=True)]
    finally:
        process.kill()
        process.join()


def _make_calls(pipe: Connection, calls: Sequence[GuardedCall], setup: Callable[[], object]) -> None:
    start = _result(setup)
    pipe.send(start)
    for call in [] if isinstance(start, Failure) else calls:
        pipe.send(_result(call.function, *call.arguments))


def _result(function: Callable[..., Any], *arguments: Any) -> Any | Failure:
    try:
        return function(*arguments)
    except Exception as error:  # of any type: the other calls must still be made
        return Failure(" ".join(f"{type(error).__name__}: {error}".split())[:300])
