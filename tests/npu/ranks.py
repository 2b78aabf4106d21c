"""Processes with the stand-in and a real ProcessGroupHCCL: one per rank, new ones for every run.

A process that has loaded the stand-in and torch_npu, but has touched no device, is forked for each rank, so a run starts
within a second. Nothing of a run outlives it: all processes are ended when it is over, at the latest after its time limit.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG
from tests.processes import Outcome, Ranks, answer, preload, values

DEFAULTS = {"HOST_HCCL_TIMEOUT": str(HANG), "HCCL_EXEC_TIMEOUT": str(HANG)}  # torch_npu itself looks at the second
READ_AT_IMPORT = {"HOST_CANN_VERSION", "HOST_CANN_SOC"}  # by torch_npu: ranks with these have a server of their own
preload("tests.npu.preload")


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
        return values(self.outcomes)

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


def start(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    limit: float = HANG,
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
    read_at_import = frozenset((name, value) for name, value in (environment or {}).items() if name in READ_AT_IMPORT)
    processes = Ranks()
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-ranks-") as folder:
        trace, logs = Path(folder) / "trace", [Path(folder) / f"stderr{rank}" for rank in range(size)]
        settings = {**DEFAULTS, "HOST_HCCL_TRACE": str(trace), **(environment or {})}
        try:
            with _forked_with(read_at_import):
                for rank, log in enumerate(logs):
                    processes.start(_serve, rank, size, store.port, settings, log, function, args)
            outcomes = [
                _with_log(outcome, log) for outcome, log in zip(processes.outcomes(size, limit), logs, strict=True)
            ]
        finally:
            processes.end()
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


@contextmanager
def _forked_with(settings: frozenset[tuple[str, str]]) -> Iterator[None]:
    """Processes that start within the block are forked from a server in which torch_npu was imported with these settings."""
    with pytest.MonkeyPatch.context() as patch:
        if settings:
            patch.setattr(forkserver, "connect_to_new_process", _server_with(settings).connect_to_new_process)
        yield


@cache
def _server_with(settings: frozenset[tuple[str, str]]) -> forkserver.ForkServer:
    """One server for each choice of settings, which ends with this process."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.npu.preload"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings:
            patch.setenv(name, value)
        server.ensure_running()
    return server


@pytest.fixture
def ranks() -> Callable[..., Run]:
    """`run`, as a fixture."""
    return run


def wait_for_end(rank: int) -> None:
    """In a rank: wait until the process of another one has ended."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    process = int(store.get(f"process {rank}"))
    with suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            time.sleep(0.02)


def _with_log(outcome: Outcome, log: Path) -> Outcome:
    if outcome.error is None or not log.exists():
        return outcome
    return replace(outcome, error=f"{outcome.error}\nstderr:\n{log.read_text()[-4000:]}")


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    port: int,
    settings: Mapping[str, str],
    log: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(settings, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    has_returned = answer(pipe, _in_a_group, rank, size, port, function, args)
    os._exit(not has_returned)  # at once: torch_npu's threads would wait for what failed


def _in_a_group(rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    import tests.npu.preload  # noqa: F401  (done before, in a forked process)
    from tests.host_cann import task_queue

    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    limit = timedelta(seconds=HANG)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=size, timeout=limit)
    _get_default_store().set(f"process {rank}", str(os.getpid()))
    value = function(rank, size, *args)
    if task_queue.has_ended():
        return value
    torch.npu.synchronize()
    dist.destroy_process_group()
    return value


def _end_with_parent() -> None:
    """A rank whose parent was killed ends too."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
