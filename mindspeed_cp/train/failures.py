"""How a rank ends: by a signal that asks it to stop, or by an error of a kind, with one line of text and an exit code.

Importing this module imports neither torch nor Megatron.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device import npu_errors
from mindspeed_cp.errors import ConfigError, CorruptionError, DivergenceError, OperatorError, PeerError, PlanError

OK, FAILED, BAD_INPUT = 0, 1, 2  # exit codes
# Lower-case parts of gloo's and the store's messages about a process that is gone or silent (HCCL: npu_errors).
_LOST_CONNECTION_TEXTS = (
    *("connection closed by peer", "connection reset by peer", "broken pipe", "gloo/transport", "gloo/rendezvous"),
    *("gloo connectfullmesh", "tcpstore", "diststoreerror", "distnetworkerror"),
)
_OPEN_FILES = "raise the limit of open files, ulimit -n, or use fewer ranks"
#: Parts of messages of a limit of the system, which torch, gloo and Python tell without an errno.
_SYSTEM_LIMITS = {
    "Too many open files": _OPEN_FILES,
    "can't start new thread": "raise the limit of processes and threads, ulimit -u, or use fewer ranks",
}
_ERRNO_REMEDIES = {
    errno.EMFILE: _OPEN_FILES,
    errno.ENFILE: "this machine has no more files to open (sysctl fs.file-max)",
    errno.EFBIG: "raise the limit of the size of a file, ulimit -f, and the same command goes on from the newest "
    "checkpoint",
}
NCCL_REMEDY = "look whether all ranks live; the time-out is context_parallel_suite.timeout_seconds"
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")
_KINDS_OF_ERRORS = {
    ConfigError: "input", PlanError: "input", CorruptionError: "corruption", DivergenceError: "divergence",
    OperatorError: "device", PeerError: "peer",
}  # fmt: skip


def classify_error(error: BaseException) -> tuple[str, str, int]:
    """Return kind, one line and exit code for the error that ended a rank.

    Kinds: input, corruption (a rank computed wrong numbers), divergence (the loss is not finite or a spike), peer,
    files (a disk is full, a checkpoint cannot be written), device (an NPU, its operator or HCCL refused or failed), and
    bug for everything else.
    """
    for types, kind in _KINDS_OF_ERRORS.items():
        if isinstance(error, types):
            return kind, str(error), BAD_INPUT if kind == "input" else FAILED
    if isinstance(error, OSError):
        return "files", _file_error(error), FAILED
    if isinstance(error.__cause__, OSError):
        return classify_error(error.__cause__)
    text = str(error)
    if isinstance(error, RuntimeError) and npu_errors.classify_hccl_error(text) is not None:
        return "peer" if npu_errors.is_lost_peer(text) else "device", npu_errors.hccl_error_line(text), FAILED
    if isinstance(error, RuntimeError) and npu_errors.is_operator_error(text):  # raised late, by torch_npu's queue
        return "device", npu_errors.operator_error_line(text), FAILED
    if isinstance(error, RuntimeError) and npu_errors.is_device_error(text):
        return "device", npu_errors.device_error_line(text), FAILED
    for part, remedy in _SYSTEM_LIMITS.items():
        if part in text:
            return "files", f"{text.splitlines()[0]}; {remedy}", FAILED
    return "bug", f"{type(error).__name__}: {error}", FAILED


def is_lost_rank_error(error: BaseException) -> bool:
    """Return True for errors of torch.distributed that mean that another process is gone or silent."""
    from torch.distributed import DistError

    kind = npu_errors.classify_hccl_error(str(error))
    if kind is not None:
        return kind == "peer"
    return isinstance(error, DistError) or any(part in str(error).lower() for part in _LOST_CONNECTION_TEXTS)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on the host or on a device."""
    text = str(error)
    if isinstance(error, MemoryError):
        return True
    return any(part in text.lower() for part in _OUT_OF_MEMORY_TEXTS) and npu_errors.classify_hccl_error(text) is None


def out_of_memory_error(settings: Settings, rank: int) -> ConfigError:
    """Return the error that replaces a failed allocation of a rank."""
    return ConfigError(
        f"data.seq_length = {settings.data.seq_length}: does not fit, rank {rank} ran out of memory; use less, more "
        "context_parallel_suite.context_parallel_size on more machines, or model.recompute_granularity: full"
    )


def lost_over_device(rank: int, error: BaseException, device_type: str) -> PeerError:
    """Return the PeerError for a lost connection on NPUs or GPUs, where no time is left to ask which rank is gone."""
    if isinstance(error, PeerError):  # names the rank already
        return error
    remedy = npu_errors.HCCL_REMEDY if device_type == "npu" else NCCL_REMEDY
    return PeerError(f"rank {rank} lost a peer: {npu_errors.short_cause(str(error))}; {remedy}")


def _file_error(error: OSError) -> str:
    text = error.strerror or str(error) or type(error).__name__
    if error.errno in _ERRNO_REMEDIES:
        text = f"{text}; {_ERRNO_REMEDIES[error.errno]}"
    if error.filename is not None:
        return f"{error.filename}: {text}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{text}; free some space, and the same command goes on from the newest checkpoint"
    return text


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP (a closed terminal) unless it is ignored, as by nohup."""
    always = (signal.SIGTERM, signal.SIGINT)
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)


@contextmanager
def stop_signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the signals of `stop_signals` within the block."""
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


class StopRequest:
    """Remembers signals, as a handler of :func:`stop_signals_to`, and the death of the launcher."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._parent = os.getppid()

    @property
    def reason(self) -> str | None:
        """Source of the request, as in "stopped by ...", or None."""
        if os.getppid() != self._parent:  # torch has the system send SIGINT then, other launchers nothing
            self._reason = "the death of the launcher"
        return self._reason

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._reason = self._reason or signal.Signals(number).name
