"""Fresh ranks in a moment: a process that has imported Megatron forks them.

Importing Megatron takes seconds and each training test needs processes of its own (process groups, random state and
Megatron's globals must be new), so one process imports it once and forks a rank for every test that asks for one.  It
has no threads and no process groups of its own, so its children start clean.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

START_SECONDS = 120


class RankError(AssertionError):
    """A rank failed; carries the traceback of each that did."""


class Nursery:
    """`run` executes a function in as many new processes as asked for."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self._is_ready = False

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """function(*args) in `size` ranks, which find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Args:
            size: number of ranks.
            function: at module level; arguments and results travel by pickle.
            timeout: seconds; ranks that have not ended by then are killed.

        Returns:
            The results in the order of ranks.

        Raises:
            RankError: a rank raised or died.
        """
        if not self._is_ready:
            if not self._pipe.poll(START_SECONDS):
                raise RankError(f"Megatron was not imported within {START_SECONDS} s")
            self._pipe.recv()
            self._is_ready = True
        self._pipe.send((size, function, args, timeout))
        if not self._pipe.poll(timeout + 10):
            raise RankError(f"no answer within {timeout + 10} s")
        answers = self._pipe.recv()
        failed = [f"rank {rank}: {value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failed:
            raise RankError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401

    import mindspeed_cp.train.loop  # noqa: F401

    pipe.send("ready")
    while True:
        try:
            size, function, args, timeout = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(size, function, args, timeout))


def _run(size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[tuple[bool, Any]]:
    context = mp.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, size, port, function, args, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers: list[tuple[bool, Any]] = [(False, f"no answer within {timeout} s")] * size
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout)
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[arg-type]
            try:
                answers[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                answers[rank] = (False, "the process died")
    for process in processes:
        process.join(2)
        process.kill()
        process.join()
    return answers


def _rank(
    rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], pipe: Connection
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(max(size, os.cpu_count() or 1)),  # one thread each
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    os._exit(0)
