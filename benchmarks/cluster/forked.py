"""Ranks that are forks of this process, each in its own namespace: nothing is imported or planned twice.

A Python that imports torch and Megatron takes seconds of a core; a fork does not, and shares what it does not write. So
a machine of a few cores can have 64 ranks.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks.cluster.fabric import ENDING, ClusterError, failure_line, unbroken
from benchmarks.cluster.network import Names, Shape

NETWORK = 0x40000000  # CLONE_NEWNET
NAMESPACES = Path("/run/netns")
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "nic"}


def fork_ranks(
    names: Names,
    shape: Shape,
    rank_main: Callable[[int], None],
    folder: Path,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Run a fork of this process for each rank, in its namespace, until all have ended; none outlives this call.

    Args:
        names: of the namespaces.
        shape: of the cluster.
        rank_main: what a rank does.
        folder: gets what each rank writes, as rank<r>.log.
        watch: called a few times a second.

    Raises:
        ClusterError: a rank failed; names it, with the last line that it wrote.
    """
    codes: dict[int, int | None] = {}
    processes: list[int] = []
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    gc.freeze()  # a collection would write to all objects, and so copy them
    try:
        for rank in range(shape.ranks):
            with unbroken():  # a signal must not find a fork in the code of this process
                process = os.fork()
                if not process:
                    _run_forked(names, rank, rank_main, folder)
                processes.append(process)
                codes[process] = None
        while None in codes.values():
            for process, code in list(codes.items()):
                if code is None:
                    codes[process] = _exit_code(process)
            watch()
            failed = [rank for rank, process in enumerate(processes) if codes[process]]
            if failed:
                raise ClusterError(failure_line(folder, failed, [codes[process] for process in processes]))
            time.sleep(0.1)
    finally:
        with unbroken():
            for process in processes:
                if codes[process] is None:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
        gc.unfreeze()


def _exit_code(process: int) -> int | None:
    """Return how a process ended; None: it runs."""
    ended, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _run_forked(names: Names, rank: int, rank_main: Callable[[int], None], folder: Path) -> None:
    """Be a rank, and end."""
    code = 1
    try:
        end_with_parent()
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # whatever they were before
        os.setsid()
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        enter(names.rank(rank))
        os.environ |= ENVIRONMENT
        rank_main(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_with_parent() -> None:
    """End this process when the program that started it ends, even if that is killed."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit("the program that started this rank is gone")


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts from now on, to a network namespace.

    Raises:
        OSError: there is no such namespace, or no right to enter it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        if library.setns(descriptor, NETWORK):
            raise OSError(ctypes.get_errno(), f"namespace {namespace} cannot be entered")
    finally:
        os.close(descriptor)
