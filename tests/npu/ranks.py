"""Processes with the stand-in and a real ProcessGroupHCCL: one per rank, new ones for every run.

A process that has loaded the stand-in and torch_npu, but has touched no device, is forked for each rank, so a run starts
within a second. Nothing of a run outlives it: all processes are ended when it is over, at the latest after its time limit.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

LIMIT = 60.0  # seconds for a run
DEFAULTS = {"HOST_HCCL_TIMEOUT": "20", "HCCL_EXEC_TIMEOUT": "20"}  # torch_npu itself looks at the second
READ_AT_IMPORT = {"HOST_CANN_VERSION", "HOST_CANN_SOC"}  # by torch_npu: ranks with these start from nothing, in seconds
_forking = mp.get_context("forkserver")
_forking.set_forkserver_preload(["tests.npu.preload"])


class RankError(AssertionError):
    """A function failed on a rank, or a rank ended or was silent; carries all ranks' errors."""


@dataclass(frozen=True)
class Outcome:
    """What became of a rank.

    Attributes:
        value: what the function returned.
        error: traceback or reason, and what the process wrote to stderr; None if the function returned.
        exit: exit status of a process that ended without an answer (negative: the signal), else None.
        seconds: from the start of the run to the answer.
    """

    value: Any = None
    error: str | None = None
    exit: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """Outcomes by rank, and the calls that the ranks made of the HCCL stand-in.

    `trace` holds the lines of HOST_HCCL_TRACE (tests/host_cann/hccl_trace.cpp), in the order in which they were written.
    """

    outcomes: list[Outcome]
    trace: list[dict[str, Any]] = field(default_factory=list)

    @property
    def errors(self) -> list[str | None]:
        """By rank."""
        return [outcome.error for outcome in self.outcomes]

    def values(self) -> list[Any]:
        """What the function returned, by rank.

        Raises:
            RankError: a rank failed.
        """
        failed = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(self.outcomes) if outcome.error]
        if failed:
            raise RankError("\n".join(failed))
        return [outcome.value for outcome in self.outcomes]

    def calls(self, rank: int | None = None, name: str | None = None) -> list[dict[str, Any]]:
        """Calls that put work on a stream, of one rank of the world or all, of one entry point or all."""
        return [
            line
            for line in self.trace
            if line["event"] == "call" and rank in (None, line["process"]) and name in (None, line["name"])
        ]

    def created(self, rank: int | None = None) -> list[dict[str, Any]]:
        """Communicators made, as their ranks see them."""
        return [line for line in self.trace if line["event"] == "create" and rank in (None, line["process"])]

    def times(self, call: Mapping[str, Any]) -> tuple[int, int]:
        """Start and end of a call's task, in ns of a clock that all ranks share."""
        for line in self.trace:
            if line["event"] == "ran" and line["pid"] == call["pid"] and line["call"] == call["call"]:
                return line["start"], line["end"]
        raise LookupError(f"{call['name']} of rank {call['process']} did not run")


def start(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    limit: float = LIMIT,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """function(rank, size, *args) on `size` ranks whose default group is HCCL; does not raise when ranks fail.

    Args:
        size: number of processes.
        function: at module level; arguments and result travel by pickle. Tensors do so as CPU tensors.
        limit: seconds; who has not answered by then is killed.
        environment: variables for the ranks (HOST_CANN_..., HOST_HCCL_..., HCCL_...). DEFAULTS hold unless given.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every rank
    begin = time.monotonic()
    context = mp.get_context("spawn") if READ_AT_IMPORT & set(environment or {}) else _forking
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-ranks-") as folder:
        trace = Path(folder) / "trace"
        settings = {**DEFAULTS, "HOST_HCCL_TRACE": str(trace), **(environment or {})}
        processes, pipes = [], []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                log = Path(folder) / f"stderr{rank}"
                work = (rank, size, store.port, limit, settings, log, function, args, theirs)
                process = context.Process(target=_serve, args=work, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            outcomes = _collect(processes, pipes, begin, limit)
            outcomes = [_with_log(outcome, Path(folder) / f"stderr{rank}") for rank, outcome in enumerate(outcomes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
        lines = trace.read_text().splitlines() if trace.exists() else []
    return Run(outcomes, [json.loads(line) for line in lines])


def run(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> Run:
    """As `start`, for functions that must not fail.

    Raises:
        RankError: a rank failed.
    """
    done = start(size, function, *args, **options)
    done.values()
    return done


def folder() -> Path:
    """Of the stand-in's libraries."""
    from tests import host_cann

    return Path(os.environ.get("HOST_CANN_BUILD") or host_cann.FOLDER)


@pytest.fixture
def ranks() -> Callable[..., Run]:
    """`run`, as a fixture."""
    return run


def _collect(processes: list[Any], pipes: list[Connection], begin: float, limit: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = begin + limit
    while len(outcomes) < len(pipes) and time.monotonic() < deadline:
        open_ranks = [rank for rank in range(len(pipes)) if rank not in outcomes]
        # a pipe does not close while a child of its rank has it, hence the processes too
        watched = [thing for rank in open_ranks for thing in (pipes[rank], processes[rank].sentinel)]
        wait(watched, max(0.0, deadline - time.monotonic()))
        for rank in open_ranks:
            gone = bool(wait([processes[rank].sentinel], 0))
            if pipes[rank].poll():
                try:
                    ok, value = pipes[rank].recv()
                    outcome = Outcome(value=value) if ok else Outcome(error=value)
                except EOFError:
                    outcome = _ended(processes[rank])
            elif gone:
                outcome = _ended(processes[rank])
            else:
                continue
            outcomes[rank] = replace(outcome, seconds=time.monotonic() - begin)
    silent = Outcome(error=f"no answer within {limit:g} s", seconds=limit)
    return [outcomes.get(rank, silent) for rank in range(len(pipes))]


def _ended(process: Any) -> Outcome:
    process.join(5)
    status = process.exitcode
    how = f"killed by {signal.Signals(-status).name}" if status and status < 0 else f"ended with status {status}"
    return Outcome(error=f"the process was {how}", exit=status)


def _with_log(outcome: Outcome, log: Path) -> Outcome:
    if outcome.error is None or not log.exists():
        return outcome
    return replace(outcome, error=f"{outcome.error}\nstderr:\n{log.read_text()[-4000:]}")


def _serve(
    rank: int,
    size: int,
    port: int,
    limit: float,
    settings: Mapping[str, str],
    log: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    pipe: Connection,
) -> None:
    os.environ.update(settings, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import torch
        import torch.distributed as dist

        import tests.npu.preload  # noqa: F401  (done before, in a forked process)

        torch.set_num_threads(1)
        torch.npu.set_device(rank)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=limit))
        dist.init_process_group("hccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit))
        value = function(rank, size, *args)
        torch.npu.synchronize()
        dist.destroy_process_group()
        pipe.send((True, value))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)  # at once: torch_npu's threads would wait for what failed
    os._exit(0)


def _end_with_parent() -> None:
    """A rank whose parent was killed ends too."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
