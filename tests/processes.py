"""Processes of tests, each with a pipe: what every one answered, or what became of it.

All are forked by one server, which has imported what `preload` names, so that a process starts in a moment. The server
has no threads and no process groups: its children start clean.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.limits import HANG

forked = mp.get_context("forkserver")
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Let the server import modules before it forks the first process; later calls have no effect."""
    _preloaded.extend(module for module in modules if module not in _preloaded)
    forked.set_forkserver_preload(_preloaded)


class RankError(AssertionError):
    """A function failed on a rank, or a rank ended or was silent; carries the errors of all such ranks."""


@dataclass(frozen=True)
class Outcome:
    """What became of a rank.

    Attributes:
        value: what the function returned.
        error: traceback or reason; None if the function returned.
        exit: exit status of a process that ended without an answer (negative: the signal), else None.
    """

    value: Any = None
    error: str | None = None
    exit: int | None = None


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the function returned, by rank.

    Raises:
        RankError: a rank failed.
    """
    failed = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    if failed:
        raise RankError("\n".join(failed))
    return [outcome.value for outcome in outcomes]


def answer(pipe: Connection, function: Callable[..., Any], *args: Any) -> bool:
    """In a process: send what the function returns, or its traceback; return whether it returned."""
    try:
        outcome = Outcome(function(*args))
    except BaseException:
        outcome = Outcome(error=traceback.format_exc())
    pipe.send(outcome)
    return outcome.error is None


class Ranks:
    """Processes in the order of their ranks."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __len__(self) -> int:
        return len(self._processes)

    def start(self, target: Callable[..., None], *args: Any, context: Any = forked) -> None:
        """Start the next rank: target(pipe, *args) in a process, which `answer`s through the pipe."""
        pipe, far_end = context.Pipe()
        process = context.Process(target=target, args=(far_end, *args), daemon=True)
        process.start()
        far_end.close()
        self._processes.append(process)
        self._pipes.append(pipe)

    def send(self, rank: int, message: Any) -> None:
        """Send a message to a rank."""
        self._pipes[rank].send(message)

    def outcomes(self, size: int, limit: float = HANG) -> list[Outcome]:
        """Collect one answer of each of the first `size` ranks, within `limit` seconds in all."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + limit
        while len(outcomes) < size and time.monotonic() < deadline:
            waiting = [rank for rank in range(size) if rank not in outcomes]
            # A pipe does not close while a child of its rank has it, hence the processes too.
            watched = [end for rank in waiting for end in (self._pipes[rank], self._processes[rank].sentinel)]
            ready = wait(watched, max(0.0, deadline - time.monotonic()))
            for rank in waiting:
                has_ended = self._processes[rank].sentinel in ready  # before its last answer is read
                if self._pipes[rank].poll():
                    try:
                        outcomes[rank] = self._pipes[rank].recv()
                    except EOFError:
                        outcomes[rank] = self._ended(rank)
                elif has_ended:
                    outcomes[rank] = self._ended(rank)
        silent = Outcome(error=f"no answer within {limit:g} s")
        return [outcomes.get(rank, silent) for rank in range(size)]

    def _ended(self, rank: int) -> Outcome:
        process = self._processes[rank]
        process.join()
        status = process.exitcode
        if status and status < 0:
            return Outcome(error=f"the process was killed by {signal.Signals(-status).name}", exit=status)
        return Outcome(error=f"the process ended with status {status}", exit=status)

    def end(self) -> None:
        """Kill the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


class Pool:
    """Ranks that run one function after another: started by the first, and anew after a failure."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._ranks = Ranks()

    def call(self, size: int, function: Callable[..., Any], *args: Any, limit: float = HANG) -> list[Any]:
        """function(rank, *args) in the first `size` processes; the results in the order of ranks.

        Raises:
            RankError: a process failed, died, or did not answer within the limit.
        """
        if not 1 <= size <= self._world:
            raise ValueError(f"size is {size}; valid: 1 to {self._world}")
        if not len(self._ranks):
            self.start(self._ranks)
        for rank in range(size):
            self._ranks.send(rank, (function, rank, *args))
        try:
            return values(self._ranks.outcomes(size, limit))
        except RankError:
            self.close()
            raise

    def start(self, ranks: Ranks) -> None:
        """Start all processes."""
        for _ in range(self._world):
            ranks.start(serve)

    def close(self) -> None:
        """End the processes."""
        self._ranks.end()


def serve(pipe: Connection) -> None:
    """In a process of a pool: run functions until the pool closes or one fails.

    A process that failed ends, so that no other waits for it in vain.
    """
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        if not answer(pipe, *call):
            os._exit(1)
