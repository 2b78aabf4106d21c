"""Starting the ranks of this machine, and saying in one line how they ended.

torch's elastic agent starts and watches the processes.  What it would print about a failure is replaced by the one line
that matters: the error of the rank that failed first, or which rank was killed by which signal.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from mindspeed_cp.config import Settings
from mindspeed_cp.config_checks import data_parallel_size
from mindspeed_cp.data import open_corpus
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.npu_errors import TIMEOUTS
from mindspeed_cp.train.files import RunFiles
from mindspeed_cp.train.memory import check_memory
from mindspeed_cp.train.resume import checkpoint_to_resume
from mindspeed_cp.train.stop import stop_signals
from mindspeed_cp.train.worker import BAD_INPUT, FAILED, OK, WILL, explain, leave, record, run_rank

# torch_npu's watchdog takes the whole process down, and says why on standard error.
_ABORTED = (
    "aborted (SIGABRT): on NPUs torch_npu does that when an HCCL operation fails or a peer does not answer within "
    f"{TIMEOUTS}; its message above names them"
)
_GOES_ON = "the same command goes on from the newest checkpoint, if there is one"


def start_local_ranks(settings: Settings, nproc: int | None, *, as_json: bool) -> int:
    """Train with `nproc` ranks on this machine (default: one replica).

    Returns:
        0 when the run is complete or was stopped on request, 1 when it failed; failures of the input raise.  A run that
        was asked to stop is never started again.

    Raises:
        ConfigError: found before any rank is started, or by a rank.
    """
    ranks = settings.model_parallel_size if nproc is None else nproc
    preflight(settings, ranks)
    restarts = settings.train.max_restarts
    for attempt in range(restarts + 1):
        code, line, asked = _launch(settings, ranks, as_json=as_json)
        if code == BAD_INPUT:
            raise ConfigError(line)
        if code == OK:
            if line:
                print(line, file=sys.stderr if as_json else sys.stdout)
            return OK
        if asked:
            break
        if attempt < restarts:
            print(f"{line}; starting all ranks again ({attempt + 1} of {restarts})", file=sys.stderr)
            resumed = settings.checkpoint.model_copy(update={"resume": True})
            settings = settings.model_copy(update={"checkpoint": resumed})
    print(f"error: {line}", file=sys.stderr)
    return FAILED


def preflight(settings: Settings, ranks: int) -> None:
    """Find what is wrong before ranks are started and before torch is imported.  Raises ConfigError."""
    data_parallel_size(settings, ranks)
    check_memory(settings, ranks)
    open_corpus(settings.data.corpus)
    RunFiles(Path(settings.output.folder)).make()
    checkpoint_to_resume(settings)


def run_under_launcher(settings: Settings, *, as_json: bool) -> int:
    """Be one rank of torchrun or the like.  Every rank tells what ended it, in one line with its number."""
    try:
        run_rank(settings, as_json=as_json)
    except BaseException as error:  # torch's CheckpointException is no Exception
        kind, line, code = explain(error)
        record(kind, line)
        if kind == "bug":
            raise
        rank = os.environ["RANK"]
        whose = "" if rank == "0" or kind in ("peer", "stopped") else f"rank {rank}: "  # these lines name their rank
        print(f"error: {whose}{' '.join(line.split())}", file=sys.stderr)
        leave(code)
    return OK


def _launch(settings: Settings, ranks: int, *, as_json: bool) -> tuple[int, str, list[str]]:
    """Start all ranks and wait for them: exit code, the line to say, and the signals that asked to stop."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host's name resolves to: ranks are all here
    records = tempfile.mkdtemp(prefix="mindspeed-cp-")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"mindspeed-cp-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a store inside this process, on a port that the system picks
        local_addr="localhost",
        max_restarts=0,
        signals_to_handle="SIGQUIT",  # the others are relayed
        logs_specs=DefaultLogsSpecs(log_dir=records),
    )
    arguments = ["-m", "mindspeed_cp.train.worker", settings.model_dump_json(), *["--json"] * as_json]
    try:
        with _quiet_agent(), _relay_signals() as asked:
            try:
                elastic_launch(config, sys.executable)(*arguments)
                return OK, "", asked
            except ChildFailedError as error:
                return *_verdict(error.failures, asked), asked
            except SignalException as error:
                name = signal.Signals(error.sigval).name
                return FAILED, f"ended by {name}; {_GOES_ON}", [name]
    finally:
        shutil.rmtree(records, ignore_errors=True)


def _verdict(failures: dict[int, Any], asked: list[str]) -> tuple[int, str]:
    """Exit code and line for what the agent saw: the likeliest cause first, what follows from another failure last.

    Args:
        failures: in the agent's order, in which those that it ended itself come last.
        asked: signals that asked to stop.
    """
    kinds: dict[str, tuple[int, str]] = {}
    when: dict[str, float] = {}
    order = list(failures)
    wordless: set[int] = set()  # ended by a signal with nothing but the last words on record, so nobody knows when
    for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp):
        message = failure.message if isinstance(failure.message, dict) else {}
        if message.get("extraInfo", {}).get("kind") == WILL and failure.exitcode < 0:
            message = {}  # the signal says it better
            wordless.add(rank)
        kind = message.get("extraInfo", {}).get("kind", "killed" if failure.exitcode < 0 else "bug")
        if kind == "killed" and -failure.exitcode in (signal.SIGTERM, signal.SIGHUP):
            kind = "terminated"
        if kind == "killed" and failure.exitcode == -signal.SIGABRT:
            kind = "aborted"  # perhaps because another rank was killed
        kinds.setdefault(kind, (rank, message.get("message") or _end(failure)))
        when.setdefault(kind, failure.timestamp)
    if {"peer", "killed"} <= kinds.keys():
        lost, killed = kinds["peer"][0], kinds["killed"][0]
        first = order.index(lost) < order.index(killed) if killed in wordless else when["peer"] < when["killed"]
        if first:
            del kinds["killed"]  # silent, not dead: the others gave it up, and then the agent had to kill it
    if asked and kinds.keys() <= {"peer", "terminated"}:  # before the first step, or in one that could not be finished
        return OK, f"stopped by {asked[0]}; {_GOES_ON}"
    for kind in ("input", "killed", "files", "device", "bug", "stopped", "aborted", "peer", WILL, "terminated"):
        if kind not in kinds:
            continue
        rank, text = kinds[kind]
        if kind == "input":
            return BAD_INPUT, text
        if kind == "stopped":
            return OK, text
        if kind in ("killed", "aborted", "terminated"):
            text = (
                f"rank {rank} {text}, and the other ranks were stopped; "
                "the same command goes on from the newest checkpoint"
            )
        elif kind in ("bug", "device", WILL):
            text = f"rank {rank} failed: {text}"
        return FAILED, text
    raise AssertionError("the agent reported a failure without failures")


def _end(failure: Any) -> str:
    if failure.exitcode >= 0:
        return f"(process {failure.pid}) ended with exit code {failure.exitcode}"
    if -failure.exitcode == signal.SIGABRT:
        return f"(process {failure.pid}) {_ABORTED}"
    return f"(process {failure.pid}) was killed by {failure.signal_name()}"


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs every signal that it sends; the one line of this module says it better."""
    logger = logging.getLogger("torch.distributed.elastic")
    before, handler = logger.propagate, logging.NullHandler()
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


@contextmanager
def _relay_signals() -> Iterator[list[str]]:
    """Hand SIGTERM, SIGINT and SIGHUP on to the ranks and wait for them to end; a second SIGINT ends them at once.

    SIGINT goes on as SIGTERM: a terminal may send it to the ranks besides, and they take a second one as an order.

    Yields:
        The names of the signals that came.
    """
    asked: list[str] = []

    def relay(number: int, frame: FrameType | None) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)
        for process in _ranks():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM if number == signal.SIGINT else number)

    before = {number: signal.signal(number, relay) for number in stop_signals()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ranks() -> list[Any]:
    """Processes that this one started."""
    import psutil

    return psutil.Process().children()
