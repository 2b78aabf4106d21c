"""The process of a rank that holds its device and measures, and the handle by which the rank's supervisor drives it.

A worker gets a measurement by name with a list of items, runs them in order, and sends a row after each. Nothing else
is shared with the supervisor, so a worker can be ended at any moment, whatever its device hangs in.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

from mindspeed_cp.cluster_check.privacy import without_addresses

Row = dict[str, Any]
Item = Mapping[str, Any]

ERROR_LIMIT = 600  # characters of an error
POLL_SECONDS = 0.1
START_SECONDS = 300.0  # until a new process must have imported what it needs
GRACE_SECONDS = 5.0  # for the worker of a rank, after that of another rank has failed


@dataclass(frozen=True)
class Outcome:
    """What the worker of one rank made of a stage.

    Attributes:
        rows: row of each finished item, by its number.
        failed_item: number of the item that failed, or that was running when the worker was ended; None if all
            finished.
        error: message; None if all finished.
        is_cause: False if the worker was ended, or gave up, because of another rank.
    """

    rows: dict[int, Row] = field(default_factory=dict)
    failed_item: int | None = None
    error: str | None = None
    is_cause: bool = False


class Worker:
    """A worker process, seen from the supervisor of its rank.

    Args:
        context: first argument of all measurements; made in the worker from what is given here.
        make_context: function of a module that makes it.
    """

    def __init__(self, make_context: Callable[..., Any], context: Sequence[Any]) -> None:
        spawn = mp.get_context("spawn")  # a fork of a process with threads, such as those of the store, may hang
        self._pipe, child = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(child, make_context, tuple(context)), daemon=True)
        self._process.start()
        self._started = False
        child.close()

    def run(
        self,
        measurement: tuple[str, str],
        items: Sequence[Item],
        first: int,
        silence: float,
        alive: Callable[[], None] = lambda: None,
        others_failed: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Run items and return their rows; end the worker if it hangs.

        Args:
            measurement: module and name of the function, called as function(context, item).
            items: all items.
            first: number of the first one to run.
            silence: seconds without a sign after which a worker that has started counts as hung.
            alive: called several times a second.
            others_failed: returns True once another rank has failed.
        """
        rows: dict[int, Row] = {}
        running, failed_since = first, None
        try:
            self._pipe.send((measurement, list(items), first))
        except OSError:
            return Outcome(rows, running, self._end_text(), True)
        deadline = time.monotonic() + START_SECONDS
        while True:
            alive()
            if not wait([self._pipe], POLL_SECONDS):
                now = time.monotonic()
                if now > deadline:
                    self.end()
                    limit = silence if self._started else START_SECONDS
                    return Outcome(rows, running, f"no sign of life for {limit:g} s; its process was ended", True)
                if failed_since is None and others_failed():
                    failed_since = now
                if failed_since is not None and now > failed_since + GRACE_SECONDS:
                    self.end()
                    return Outcome(rows, running, "ended, since another rank had failed", False)
                continue
            try:
                kind, number, value = self._pipe.recv()
            except (EOFError, OSError):
                return Outcome(rows, running, self._end_text(), True)
            self._started = True
            deadline = time.monotonic() + silence
            if kind == "end":
                return Outcome(rows)
            if kind == "error":
                text, is_cause = value
                return Outcome(rows, number, text, is_cause)
            running = number
            if kind == "row":
                rows[number] = value

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _end_text(self) -> str:
        self._process.join(GRACE_SECONDS)
        code = self._process.exitcode
        return f"its process ended with {'signal' if (code or 0) < 0 else 'exit code'} {abs(code or 0)}"


def _serve(pipe: Connection, make_context: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run stages until the supervisor is gone."""
    parent = mp.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    context = None
    while True:
        try:
            (module, name), items, first = pipe.recv()
        except EOFError:
            return
        number = first
        try:
            pipe.send(("begin", first, None))
            if context is None:
                context = make_context(*arguments)
            function = getattr(import_module(module), name)
            for number in range(first, len(items)):
                pipe.send(("begin", number, None))
                context.sign = lambda number=number: pipe.send(("begin", number, None))
                row = function(context, items[number])
                pipe.send(("row", number, {} if row is None else row))
            pipe.send(("end", len(items), None))
        except Exception as error:  # whatever it is, it becomes a row of the report
            pipe.send(("error", number, (error_text(error), not _blames_a_peer(error))))


def error_text(error: BaseException) -> str:
    """Return an error as one line, with its type unless it is an error of this package."""
    text = " ".join(str(error).split()) or "without a message"
    if type(error).__module__ != "mindspeed_cp.errors":
        text = f"{type(error).__name__}: {text}"
    text = without_addresses(text, (platform.node(),))  # it travels to rank 0 and into the report
    return text if len(text) <= ERROR_LIMIT else f"{text[: ERROR_LIMIT - 3]}..."


def _blames_a_peer(error: BaseException) -> bool:
    """Return True if a rank only waited in vain for all others, so that the cause is elsewhere."""
    return getattr(error, "waited_for_all", False) is True


def _end_with(sentinel: int) -> None:
    """End this process when its parent has ended, whatever it hangs in."""
    wait([sentinel])
    os._exit(1)
