"""The ranks of this machine as processes: started together, and ended when the first of them fails.

The ranks of one machine meet through a file in a folder that only this user can enter, those of many through a store of
rank 0 (train/rendezvous.py). This process listens on no port, as torch's elastic agent does on all interfaces, and
unpickles nothing: the record of a rank's end is JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_cp.train.nodes import Nodes
from mindspeed_cp.train.rank_logs import RankLogs

STORE_VARIABLE = "MINDSPEED_CP_STORE"  # the file through which the ranks of one start meet
LAUNCHER_VARIABLE = "MINDSPEED_CP_LAUNCHER"  # the process that started them
POLL_SECONDS = 0.05
GRACE_SECONDS = 30.0  # for ranks that are asked to end, before they are killed
_ENDED, _ASKED = "ended.json", "asked.json"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class RankFailure:
    """How a rank failed.

    Attributes:
        rank, pid: the rank, and its process.
        exitcode: exit status, or minus the number of the signal that ended it.
        message: the record that the rank left (train/exit_note.py), or None.
        timestamp: when, in seconds since 1970; that of the record, if there is one.
    """

    rank: int
    pid: int
    exitcode: int
    message: dict[str, Any] | None
    timestamp: int

    def signal_name(self) -> str:
        """Return the name of the signal that ended the rank, or "" without one."""
        return signal.Signals(-self.exitcode).name if self.exitcode < 0 else ""


class RankProcesses:
    """All ranks of this node, each a process that runs one command."""

    def __init__(
        self,
        command: Sequence[str],
        ranks: int,
        folder: Path,
        nodes: Nodes | None = None,
        logs: RankLogs | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            command: program and arguments, the same for all ranks.
            ranks: number of processes.
            folder: empty, for the store and the records; only this user may enter it.
            nodes: the nodes of the start; default: this machine alone.
            logs: where their output goes; None: to that of this process.
        """
        nodes = nodes or Nodes()
        self._first = nodes.rank * ranks
        self._records = [folder / f"rank{rank}.json" for rank in range(ranks)]
        self._ended, self._asked = folder / _ENDED, folder / _ASKED
        self._logs = logs
        shared = {
            **os.environ,
            STORE_VARIABLE: str(folder / "store"),
            LAUNCHER_VARIABLE: str(os.getpid()),
            "WORLD_SIZE": str(ranks * nodes.count),
            "LOCAL_WORLD_SIZE": str(ranks),
            **nodes.environment(),
        }
        if ranks > 1:
            shared.setdefault("OMP_NUM_THREADS", "1")
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for local, record in enumerate(self._records):
                own = {
                    "RANK": str(self._first + local),
                    "LOCAL_RANK": str(local),
                    "TORCHELASTIC_ERROR_FILE": str(record),
                }
                start = subprocess.Popen if logs is None else logs.start
                self._processes.append(start(command, env={**shared, **own}))
        except BaseException:
            self.end(0)
            raise

    def wait(self) -> dict[int, RankFailure]:
        """Wait until all ranks have ended well, or one has failed; then end the others.

        Returns:
            The failures by rank, first those of ranks that failed by themselves.
        """
        while True:
            failed = [self._first + local for local, process in enumerate(self._processes) if process.poll()]
            if failed:
                break
            if all(process.returncode == 0 for process in self._processes):
                return {}
            time.sleep(POLL_SECONDS)
        failures = {rank: self._failure(rank) for rank in failed}
        with suppress(OSError):  # without it the others find out themselves, later
            self._ended.write_text(json.dumps(failed), encoding="utf-8")
        self.end(GRACE_SECONDS)
        for rank, process in enumerate(self._processes, self._first):
            if rank not in failures and process.returncode:
                failures[rank] = self._failure(rank)
        return failures

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that run."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def ask_to_stop(self, number: int) -> None:
        """Hand a signal that asked this process to stop on to all ranks, which learn its name (`asked_by`).

        SIGINT goes on as SIGTERM: a terminal may send it to the ranks besides, and they take a second one as an order.
        """
        with suppress(OSError):  # without it the ranks name the signal that they get
            self._asked.write_text(json.dumps(signal.Signals(number).name), encoding="utf-8")
        self.signal(signal.SIGTERM if number == signal.SIGINT else number)

    def end(self, grace: float) -> None:
        """Ask all ranks to end, and kill those that have not after `grace` seconds."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        if self._logs is not None:
            self._logs.close()

    def _failure(self, rank: int) -> RankFailure:
        process, record = self._processes[rank - self._first], self._records[rank - self._first]
        return read_failure(rank, process.pid, process.returncode, record)


def read_failure(rank: int, pid: int, exitcode: int, record: Path) -> RankFailure:
    """Return how a rank failed, by its exit status and by the record that it may have left."""
    message, timestamp = None, int(time.time())
    with suppress(OSError, ValueError, KeyError, TypeError):
        message = json.loads(record.read_text(encoding="utf-8"))["message"]
        timestamp = int(message["extraInfo"]["timestamp"])
    return RankFailure(rank, pid, exitcode, message, timestamp)


@contextmanager
def local_ranks(
    command: Sequence[str], ranks: int, nodes: Nodes | None = None, logs: RankLogs | None = None
) -> Iterator[RankProcesses]:
    """Run ranks within the block; none outlives it. The arguments are those of RankProcesses."""
    folder = Path(tempfile.mkdtemp(prefix="mindspeed-cp-"))  # of mode 0700
    try:
        processes = RankProcesses(command, ranks, folder, nodes, logs)
        try:
            yield processes
        finally:
            processes.end(0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_with_launcher() -> None:
    """Have the system end this rank by SIGTERM when its launcher ends, however that happens.

    Without effect in a process that `local_ranks` did not start, and on systems other than Linux.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # it ended before
        os.kill(os.getpid(), signal.SIGTERM)


def launcher_is_gone(parent: int) -> bool:
    """Return True if the launcher has ended.

    Args:
        parent: the parent of this process when it started, for ranks that another launcher started.
    """
    return os.getppid() != int(os.environ.get(LAUNCHER_VARIABLE, parent))


def ended_ranks() -> list[int]:
    """Return the ranks that the launcher reported as failed; called in a rank."""
    return _report(_ENDED) or []


def asked_by() -> str | None:
    """Return the name of the signal that asked the launcher to stop the run, or None; called in a rank."""
    return _report(_ASKED)


def _report(name: str) -> Any:
    """Return what the launcher wrote into a file beside the store, or None."""
    store = os.environ.get(STORE_VARIABLE)
    if store is None:
        return None
    try:
        return json.loads(Path(store).with_name(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there yet, or half written
        return None
