"""The ranks of this machine as processes, and how they ended: one line, and an exit code.

Ranks meet through a file in a folder that only this user may enter, and gloo connects them over loopback, so a local
run listens nowhere else. For ranks on many machines there are torchrun and Slurm. On the CPU ranks are forked after
torch and Megatron are imported, which takes longer than a short training; on devices each starts anew.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

from mindspeed_cp.config.rules import data_parallel_size
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device import npu_errors, open_files
from mindspeed_cp.device.select import resolve_device_type
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.schema.messages import name_ranks
from mindspeed_cp.train.failures import (
    BAD_INPUT,
    FAILED,
    OK,
    classify_error,
    is_lost_rank_error,
    is_out_of_memory,
    lost_over_device,
    out_of_memory_error,
    stop_signals,
    stop_signals_to,
)

if TYPE_CHECKING:
    from mindspeed_cp.train.world import World

NAMING_SECONDS = 5.0  # a busy rank may notice a lost peer late
GRACE_SECONDS = NAMING_SECONDS + 2  # for ranks to end by themselves, and again before they are killed
_KEY = "mindspeed_cp/lost_a_peer"
_RESUME = "the same command goes on from the newest checkpoint"
# The watchdog of HCCL or NCCL aborts the whole process and prints the reason on standard error.
_ABORTED = (
    "aborted (SIGABRT): on NPUs torch_npu does that when an operation of HCCL fails or a peer does not answer within "
    f"{npu_errors.TIMEOUTS}, on GPUs torch for NCCL and context_parallel_suite.timeout_seconds; its log names them"
)
#: Kinds of failures, the likeliest cause first, not those that follow from it.
_KINDS = ("input", "corruption", "killed", "files", "device", "divergence", "bug", "aborted", "peer", "terminated")


@dataclass(frozen=True)
class Failure:
    """How a rank ended before the launcher asked it to: its kind, one line, and the rank."""

    kind: str
    line: str
    rank: int


def start_local_ranks(settings: Settings, nproc: int | None, *, as_json: bool) -> int:
    """Train with `nproc` ranks on this machine (default: as many as the replicas of the settings need, or one).

    Returns:
        0 when the run is complete or was stopped on request, 1 when it failed.

    Raises:
        ConfigError: A setting is wrong; found before any rank is started, or by a rank.
    """
    ranks = nproc if nproc is not None else settings.model_parallel_size * (settings.train.data_parallel_size or 1)
    data_parallel_size(settings, ranks)  # what else does not fit, each rank refuses
    try:
        failures, stop_signal = _run_local_ranks(settings, ranks, as_json=as_json)
    except OSError as error:  # a limit of the system
        _, line, _ = classify_error(error)
        print(f"error: the {ranks} ranks cannot be started: {line}; see ulimit -n and ulimit -u", file=sys.stderr)
        return FAILED
    if not failures:
        return OK
    code, line = verdict(failures, stop_signal)
    if code == BAD_INPUT:
        raise ConfigError(line)
    print(f"error: {line}" if code else line, file=sys.stderr if code or as_json else sys.stdout)
    return code


def run_under_launcher(settings: Settings, *, as_json: bool) -> int:
    """Run one rank that torchrun or a similar launcher started; every rank prints its error in one line."""
    try:
        run_rank(settings, as_json=as_json)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        kind, line, code = classify_error(error)
        if kind == "bug":
            raise
        rank = os.environ["RANK"]
        prefix = "" if rank == "0" or kind in ("corruption", "divergence", "peer") else f"rank {rank}: "
        print(f"error: {prefix}{' '.join(line.split())}", file=sys.stderr)
        _exit(code)
    return OK


def verdict(failures: Sequence[Failure], stop_signal: str | None) -> tuple[int, str]:
    """Return exit code and line for a run that failed: the likeliest cause.

    Args:
        failures: of the ranks that ended by themselves, in the order in which they did.
        stop_signal: the signal that asked this process to stop, or None.
    """
    failure = min(failures, key=lambda failure: _KINDS.index(failure.kind))
    if failure.kind == "input":
        return BAD_INPUT, failure.line
    if stop_signal is not None and failure.kind in ("peer", "terminated"):  # in a step that could not be finished
        return OK, f"stopped by {stop_signal}; {_RESUME}, if there is one"
    if failure.kind in ("killed", "aborted", "terminated"):
        return FAILED, f"rank {failure.rank} {failure.line}, and the other ranks were stopped; {_RESUME}"
    return FAILED, f"rank {failure.rank} failed: {failure.line}" if failure.kind in ("bug", "device") else failure.line


def _run_local_ranks(settings: Settings, ranks: int, *, as_json: bool) -> tuple[list[Failure], str | None]:
    """Run all ranks; return how those failed that did so by themselves, and the signal that asked to stop."""
    with uncompiled_megatron():
        import torch.multiprocessing as mp

        method = "spawn"
        if resolve_device_type(settings.train.device) == "cpu":
            method = "fork"
            import mindspeed_cp.train.loop  # noqa: F401
    # It tells of every process that it ends.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="mindspeed-cp-"))  # of mode 0700
    sys.stdout.flush()
    arguments = (ranks, os.getpid(), folder, settings.model_dump_json(), as_json)
    stopped: list[str] = []
    processes: list[Any] = []
    failures = []

    def relay(number: int, frame: FrameType | None) -> None:
        """Hand a signal on to the ranks, as SIGTERM; a second SIGINT ends this process at once."""
        if stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped.append(signal.Signals(number).name)
        for process in processes:
            if process.exitcode is None:
                process.terminate()

    try:
        with stop_signals_to(relay):
            context = mp.start_processes(_rank, arguments, ranks, join=False, start_method=method)
            processes += context.processes
            try:
                while not context.join(grace_period=GRACE_SECONDS):
                    continue
            except mp.ProcessExitedException as error:
                failures = _failures(error.error_index, processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)
    return failures, stopped[0] if stopped else None


def _failures(first: int, processes: Sequence[Any], folder: Path) -> list[Failure]:
    """Return how the first rank that failed did, and those that left a note meanwhile; the launcher ended the others.

    Args:
        first: number of the first rank that failed.
        processes: those of all ranks.
        folder: where ranks leave notes of their errors.
    """
    failures = []
    for rank, process in enumerate(processes):
        if (folder / f"rank{rank}").exists():
            kind, line = json.loads((folder / f"rank{rank}").read_text(encoding="utf-8"))
            failures.append(Failure(kind, line, rank))
        elif rank == first:
            failures.append(_failure_by_status(rank, process))
    return failures


def _failure_by_status(rank: int, process: Any) -> Failure:
    """Return how a rank failed that left no note."""
    if process.exitcode >= 0:
        return Failure("bug", f"(process {process.pid}) ended with exit code {process.exitcode}", rank)
    number = signal.Signals(-process.exitcode)
    if number == signal.SIGABRT:
        return Failure("aborted", f"(process {process.pid}) {_ABORTED}", rank)
    kind = "terminated" if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) else "killed"
    line = f"(process {process.pid}) was killed by {number.name}"
    if number == signal.SIGKILL:
        line += " (by somebody, or by the system for want of memory)"
    return Failure(kind, line, rank)


def _rank(local: int, ranks: int, launcher: int, folder: Path, settings: str, as_json: bool) -> None:
    """Run a rank in a process of its own, which the system interrupts (SIGINT, by torch) when the launcher ends."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_DFL)
    if os.getppid() != launcher:  # it ended before
        _exit(FAILED)
    numbers = {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    if sys.platform == "linux":  # all ranks are on this machine, whatever its host name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        run_rank(Settings.model_validate_json(settings), as_json=as_json, store_file=folder / "store")
    except BaseException as error:
        kind, line, code = classify_error(error)
        if kind == "bug":
            traceback.print_exc()
        partial = folder / f".rank{local}"
        with suppress(OSError):
            partial.write_text(json.dumps([kind, " ".join(line.split())]), encoding="utf-8")
            os.replace(partial, folder / f"rank{local}")
        _exit(code)
    _exit(OK)


def uncompiled_megatron() -> AbstractContextManager[Any]:
    """Leave the functions that Megatron-core would fuse as they are written, if it is imported in this block.

    Megatron-core passes some thirty small functions to torch.compile while it is imported, which imports the whole
    compiler, a third of what a rank needs to start. The devices of `mindspeed-cp train` gain nothing from it: a step
    on the CPU would wait for a C++ compiler, and torch_npu brings none. Megatron-core's own `disable_jit_fuser` comes
    too late, since its package has used the decorator by then.
    """
    return patch("torch.compile", _as_written)


def _as_written(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Take the place of torch.compile, as a function or as a decorator with options."""
    return _as_written if function is None else function


def run_rank(settings: Settings, *, as_json: bool, store_file: Path | None = None) -> None:
    """Train as the rank that the environment names; the first rank prints the summary.

    Args:
        settings, as_json: of the run.
        store_file: as in join_ranks.

    Raises:
        ConfigError: A setting cannot be used.
        PeerError: Another rank died; the error names it where that can be found out.
    """
    faulthandler.enable(2)  # a crash in a library leaves its stacks on standard error
    open_files.raise_limit()
    with uncompiled_megatron():
        from mindspeed_cp.megatron import megatron_compat
        from mindspeed_cp.train.loop import train
    from mindspeed_cp.train.output import print_summary
    from mindspeed_cp.train.world import join_ranks

    with megatron_compat(), join_ranks(settings, store_file=store_file) as world:
        try:
            summary = train(world)
        except (PeerError, RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise out_of_memory_error(settings, world.rank) from None
            if isinstance(error, PeerError) or is_lost_rank_error(error):
                if world.device.type != "cpu":  # the library's watchdog leaves no time to ask which rank is gone
                    raise lost_over_device(world.rank, error, world.device.type) from None
                raise name_lost_ranks(world, error) from None
            raise
    if summary is not None:
        print_summary(summary, as_json=as_json)


def name_lost_ranks(world: World, error: BaseException) -> PeerError:
    """Return a PeerError that names the ranks behind a lost connection, whose error names only a socket.

    Every rank that loses a connection sets a key in the store through which the ranks met; ranks without a key after
    NAMING_SECONDS are lost, or wait for a survivor.
    """
    cause = " ".join(str(error).split())[:200]
    try:
        world.store.set(f"{_KEY}/{world.rank}", "here")
        lost = [rank for rank in range(world.size) if rank != world.rank]
        deadline = time.monotonic() + NAMING_SECONDS
        while lost and time.monotonic() < deadline:
            lost = [rank for rank in lost if not world.store.check([f"{_KEY}/{rank}"])]
            time.sleep(0.1)
    except RuntimeError:  # the store itself is gone, with the rank or the launcher that kept it
        return PeerError(f"rank {world.rank} lost its peers and the store that knows them: {cause}")
    if not lost:
        return PeerError(f"rank {world.rank} lost a connection, though every rank is alive: {cause}")
    seconds = f"{world.settings.context_parallel_suite.timeout_seconds:g} s (context_parallel_suite.timeout_seconds)"
    return PeerError(f"rank {world.rank} lost {name_ranks(lost)}: dead, or silent for {seconds}; {_RESUME} ({cause})")


def _exit(code: int) -> NoReturn:
    """End this process at once: after an error, other threads and process groups may wait for ever."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk or a closed terminal must not keep the process
            stream.flush()
    os._exit(code)
