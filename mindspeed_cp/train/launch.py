"""Starts the ranks of this machine and reports in one line how they ended.

The line is the error of the rank that failed first, or names the rank that was killed and the signal. This process
imports no torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from mindspeed_cp.config.data import POOL
from mindspeed_cp.config.derived import training_corpus
from mindspeed_cp.config.pool import pool_topology, subpools_of
from mindspeed_cp.config.rules import data_parallel_size
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device.npu_errors import TIMEOUTS
from mindspeed_cp.device.open_files import check_open_files
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.checkpoint_digests import signing_key
from mindspeed_cp.train.exit_note import EXIT_NOTE, exit_process, write_exit_note
from mindspeed_cp.train.failures import BAD_INPUT, FAILED, OK, classify_error
from mindspeed_cp.train.held_folder import check_can_be_owned, keep_files_owned
from mindspeed_cp.train.local_agent import RankFailure, RankProcesses, local_ranks
from mindspeed_cp.train.memory import check_memory
from mindspeed_cp.train.nodes import Nodes
from mindspeed_cp.train.rank_logs import RankLogs
from mindspeed_cp.train.resume import checkpoints_to_resume
from mindspeed_cp.train.run_files import RunFiles, open_no_link
from mindspeed_cp.train.stop_request import stop_signals
from mindspeed_cp.train.tensorboard_writer import check_tensorboard
from mindspeed_cp.train.worker import run_rank

# The watchdog of HCCL or NCCL aborts the whole process and prints the reason on standard error.
_ABORTED = (
    "aborted (SIGABRT): on NPUs torch_npu does that when an operation of HCCL fails or a peer does not answer within "
    f"{TIMEOUTS}, on GPUs torch for NCCL and context_parallel_suite.timeout_seconds; its log names them"
)
_RESUME_HINT = "the same command goes on from the newest checkpoint, if there is one"


def start_local_ranks(
    settings: Settings, nproc: int | None, *, as_json: bool, nodes: Nodes | None = None, logs: Path | None = None
) -> int:
    """Train with `nproc` ranks on this machine (default: its share of the replicas of the settings, or of one).

    Args:
        settings, as_json: of the run.
        nproc: number of ranks; the same on each of `nodes`.
        nodes: the nodes of the run; default: this machine alone.
        logs: folder for the output of every rank; default: `logs` in the output folder.

    Returns:
        0 when the run is complete or was stopped on request, 1 when it failed. A run that was asked to stop is not
        started again.

    Raises:
        ConfigError: A setting is wrong; found before any rank is started, or by a rank.
    """
    nodes = nodes or Nodes()
    all_ranks = settings.model_parallel_size * (settings.train.data_parallel_size or 1)
    ranks = -(-all_ranks // nodes.count) if nproc is None else nproc
    keep_files_owned()
    preflight(settings, ranks, nodes)
    restarts = settings.train.max_restarts
    for attempt in range(restarts + 1):
        code, line, stop_signal_names = _launch(settings, ranks, nodes, logs, as_json=as_json)
        if line:
            _note_end(settings, nodes, logs, line)
        if code == BAD_INPUT:
            raise ConfigError(line)
        if code == OK:
            if line:
                print(line, file=sys.stderr if as_json else sys.stdout)
            return OK
        if stop_signal_names:
            break
        if attempt < restarts:
            print(f"{line}; starting all ranks again ({attempt + 1} of {restarts})", file=sys.stderr)
            resumed = settings.checkpoint.model_copy(update={"resume": True})
            settings = settings.model_copy(update={"checkpoint": resumed})
    print(f"error: {line}", file=sys.stderr)
    return FAILED


def _note_end(settings: Settings, nodes: Nodes, logs: Path | None, line: str) -> None:
    """Append a line and its time to launcherN.log beside the logs of the ranks: how a start of the ranks ended."""
    folder = RunFiles(Path(settings.output.folder)).logs if logs is None else logs
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with suppress(OSError), open_no_link(folder / f"launcher{nodes.rank}.log") as file:
        file.write(f"{now} {line}\n")


def preflight(settings: Settings, ranks: int, nodes: Nodes) -> None:
    """Raise ConfigError for whatever can be found wrong before ranks are started and torch is imported.

    Args:
        settings: of the run.
        ranks: ranks on this machine.
        nodes: the nodes of the run; the first one alone looks at the checkpoints, with its key.
    """
    all_ranks = ranks * nodes.count
    replicas = data_parallel_size(settings, all_ranks)
    if settings.data.balance == POOL:
        suite, tensor = settings.context_parallel_suite, settings.train.tensor_model_parallel_size
        subpools_of(suite, replicas, pool_topology(suite, replicas, ranks, tensor), settings.data.pool_ranks)
    check_memory(settings, ranks, ranks=all_ranks)
    check_tensorboard(settings)
    check_open_files(all_ranks)
    training_corpus(settings)
    files = RunFiles(Path(settings.output.folder))
    files.create()
    if not settings.checkpoint.trust_unsigned:
        check_can_be_owned(files.checkpoints)
    if nodes.rank == 0:
        checkpoints_to_resume(settings)
        signing_key()


def run_under_launcher(settings: Settings, *, as_json: bool) -> int:
    """Run one rank that torchrun or a similar launcher started; every rank prints its error in one line."""
    try:
        run_rank(settings, as_json=as_json)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        kind, line, code = classify_error(error)
        write_exit_note(kind, line)
        if kind == "bug":
            raise
        rank = os.environ["RANK"]
        names_rank = kind in ("corruption", "divergence", "peer", "stopped")
        prefix = "" if rank == "0" or names_rank else f"rank {rank}: "
        print(f"error: {prefix}{' '.join(line.split())}", file=sys.stderr)
        exit_process(code)
    return OK


def _launch(
    settings: Settings, ranks: int, nodes: Nodes, logs: Path | None, *, as_json: bool
) -> tuple[int, str, list[str]]:
    """Start all ranks and wait for them; return exit code, line to print, and the signals that asked to stop."""
    if sys.platform == "linux" and nodes.count == 1:
        # All ranks are on this machine, whatever its host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not {"", os.getcwd()} & set(sys.path):  # nor do ranks look for modules in the working folder (Python 3.11)
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    arguments = ["-m", "mindspeed_cp.train.worker", settings.model_dump_json(), *["--json"] * as_json]
    command = [sys.executable, *arguments]
    rank_logs = RankLogs(RunFiles(Path(settings.output.folder)).logs if logs is None else logs)
    try:
        with local_ranks(command, ranks, nodes, rank_logs) as started, _relay_signals(started) as stop_signal_names:
            failures = started.wait()
    except OSError as error:  # a limit of the system
        _, line, code = classify_error(error)
        return code, f"the {ranks} ranks cannot be started or watched: {line}; see ulimit -n and ulimit -u", []
    if not failures:
        return OK, "", stop_signal_names
    return *_classify_failures(failures, stop_signal_names), stop_signal_names


def _classify_failures(failures: Mapping[int, RankFailure], stop_signal_names: list[str]) -> tuple[int, str]:
    """Return exit code and line for a failed run: the most likely cause, not the failures that follow from it.

    Args:
        failures: failures by rank, in the agent's order: ranks that it ended itself come last.
        stop_signal_names: signals that asked to stop.
    """
    kinds: dict[str, tuple[int, str]] = {}
    times: dict[str, float] = {}
    order = list(failures)
    unrecorded: set[int] = set()  # ended by a signal with only the exit note on record: the time is unknown
    for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp):
        kind, text = _failure_kind(failure)
        if kind == "killed" and _recorded_kind(failure) == EXIT_NOTE:
            unrecorded.add(rank)
        kinds.setdefault(kind, (rank, text))
        times.setdefault(kind, failure.timestamp)
    if {"peer", "killed"} <= kinds.keys():
        lost, killed = kinds["peer"][0], kinds["killed"][0]
        first = order.index(lost) < order.index(killed) if killed in unrecorded else times["peer"] < times["killed"]
        if first:
            del kinds["killed"]  # silent, not dead: the other ranks lost it before the agent killed it
    if stop_signal_names and kinds.keys() <= {
        "peer",
        "terminated",
    }:  # before the first step, or in one that could not be finished
        return OK, f"stopped by {stop_signal_names[0]}; {_RESUME_HINT}"
    order_of_kinds = (
        *("input", "corruption", "killed", "files", "device", "divergence", "bug", "stopped", "aborted", "peer"),
        *(EXIT_NOTE, "terminated"),
    )
    for kind in order_of_kinds:
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
        elif kind in ("bug", "device", EXIT_NOTE):
            text = f"rank {rank} failed: {text}"
            if kind == "bug":
                text += f" (its output: logs/rank{rank}.log)"
        return FAILED, text
    raise AssertionError("the agent reported a failure without failures")


def _recorded_kind(failure: RankFailure) -> str | None:
    """Return the kind that the rank wrote into its record, or None."""
    message = failure.message if isinstance(failure.message, dict) else {}
    return message.get("extraInfo", {}).get("kind")


def _failure_kind(failure: RankFailure) -> tuple[str, str]:
    """Return the kind of one rank's failure and its text."""
    kind = _recorded_kind(failure)
    text = failure.message.get("message") if isinstance(failure.message, dict) else None
    if kind == EXIT_NOTE and failure.exitcode < 0:
        kind = text = None  # the signal tells more
    kind = kind or ("killed" if failure.exitcode < 0 else "bug")
    if kind == "killed" and -failure.exitcode in (signal.SIGTERM, signal.SIGHUP):
        kind = "terminated"
    if kind == "killed" and failure.exitcode == -signal.SIGABRT:
        kind = "aborted"  # perhaps because another rank was killed
    return kind, text or _process_end(failure)


def _process_end(failure: RankFailure) -> str:
    if failure.exitcode >= 0:
        return f"(process {failure.pid}) ended with exit code {failure.exitcode}"
    if -failure.exitcode == signal.SIGABRT:
        return f"(process {failure.pid}) {_ABORTED}"
    return f"(process {failure.pid}) was killed by {failure.signal_name()}"


@contextmanager
def _relay_signals(processes: RankProcesses) -> Iterator[list[str]]:
    """Hand SIGTERM, SIGINT and SIGHUP on to the ranks and wait for them to end; a second SIGINT ends them at once.

    Yields:
        The names of the signals that came.
    """
    stop_signal_names: list[str] = []

    def relay(number: int, frame: FrameType | None) -> None:
        if stop_signal_names and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop_signal_names.append(signal.Signals(number).name)
        processes.ask_to_stop(number)

    before = {number: signal.signal(number, relay) for number in stop_signals()}
    try:
        yield stop_signal_names
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
