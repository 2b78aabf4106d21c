"""One rank: joins the others, trains, and turns whatever goes wrong into one line and an exit code.

`mindspeed-cp train` starts it as `python -m mindspeed_cp.train.worker SETTINGS-AS-JSON`; under torchrun the command
line calls `run_rank`.  Importing this module imports neither torch nor Megatron.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

from mindspeed_cp import npu_errors
from mindspeed_cp.config import Settings
from mindspeed_cp.errors import ConfigError, OperatorError, PeerError, PlanError
from mindspeed_cp.train.stop import Stopped

OK, FAILED, BAD_INPUT = 0, 1, 2
# What gloo and the store say, in lower case, when a process at the other end is gone or silent (HCCL: npu_errors).
_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo/transport",
    "gloo/rendezvous",
    "gloo connectfullmesh",
    "tcpstore",
    "diststoreerror",
    "distnetworkerror",
)
WILL = "will"  # kind of what is on record while a rank runs on an NPU
_WILL = (
    "rank {rank} ended without a word: it was killed, or torch_npu's watchdog aborted it (SIGABRT) because "
    f"an HCCL operation failed or a peer did not answer within {npu_errors.TIMEOUTS}; its standard error names it, and "
    "the same command goes on from the newest checkpoint"
)
_LAST = 2**31 - 1  # seconds: later than any failure, for torchrun takes the earliest one for the cause of all
_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def run_rank(settings: Settings, *, as_json: bool) -> None:
    """Train as the rank that the environment says; the first rank prints the summary.

    Raises:
        ConfigError: bad input, or a loss that is no number.
        PeerError: another rank died; names it where that can be found out.
        Stopped: asked to stop in a step that cannot be finished.
    """
    from mindspeed_cp.megatron import megatron_compat
    from mindspeed_cp.report.console import print_tables
    from mindspeed_cp.train.display import unless_hung_up
    from mindspeed_cp.train.loop import train
    from mindspeed_cp.train.peers import name_lost_peers
    from mindspeed_cp.train.summary import stopped_line, summary_table
    from mindspeed_cp.train.world import join

    with megatron_compat(), join(settings) as world:
        if world.device.type == "npu":
            record(WILL, _WILL.format(rank=world.rank))
        try:
            summary = train(settings, world)
        except (PeerError, RuntimeError) as error:
            if _is_memory(error):
                raise _too_large(settings, world.rank) from None
            if isinstance(error, PeerError) or is_lost_peer(error):
                if world.device.type == "npu":  # torch_npu's watchdog leaves no time to ask who is gone
                    raise _lost_over_hccl(world.rank, error) from None
                raise name_lost_peers(world, error) from None
            raise
        except MemoryError:
            raise _too_large(settings, world.rank) from None
    take_back(WILL)
    if summary is None:
        return
    with unless_hung_up():
        if as_json:
            print(json.dumps(summary), flush=True)
            return
        print_tables([summary_table(summary)])
        line = stopped_line(summary)
        if line is not None:
            print(line, flush=True)


def _lost_over_hccl(rank: int, error: BaseException) -> PeerError:
    if isinstance(error, PeerError):  # names the peer already
        return error
    return PeerError(f"rank {rank} lost a peer: {npu_errors.cause(str(error))}; {npu_errors.HCCL_REMEDY}")


def is_lost_peer(error: BaseException) -> bool:
    """True for what torch.distributed raises when another process is gone or silent."""
    from torch.distributed import DistError

    text = str(error).lower()
    kind = npu_errors.hccl_kind(str(error))
    if kind is not None:
        return kind == "peer"
    return isinstance(error, DistError) or any(part in text for part in _LOST)


def explain(error: BaseException) -> tuple[str, str, int]:
    """Kind, one line and exit code of what ended a rank.

    Kinds: input, peer, files (a disk is full, a checkpoint cannot be written), device (an NPU, its operator or
    HCCL refused or failed), stopped, and bug for everything else.
    """
    if isinstance(error, (ConfigError, PlanError)):
        return "input", str(error), BAD_INPUT
    if isinstance(error, PeerError):
        return "peer", str(error), FAILED
    if isinstance(error, Stopped):
        return "stopped", str(error), FAILED
    if isinstance(error, OSError):
        return "files", _file_error(error), FAILED
    if is_checkpoint_error(error):
        failures = error.failures  # type: ignore[attr-defined]
        rank, (cause, _) = min(failures.items(), key=lambda item: item[0])
        kind, line, code = explain(cause)
        where = f"the checkpoint of rank {rank} cannot be written or read: {line}"
        return ("files" if kind == "bug" else kind), where, code
    if isinstance(error, OperatorError):
        return "device", str(error), FAILED
    text = str(error)
    if isinstance(error, RuntimeError) and npu_errors.hccl_kind(text) is not None:
        return "peer" if npu_errors.is_lost_peer(text) else "device", npu_errors.hccl_line(text), FAILED
    if isinstance(error, RuntimeError) and npu_errors.is_operator(text):  # late: from the queue of torch_npu
        return "device", npu_errors.operator_line(text), FAILED
    if isinstance(error, RuntimeError) and npu_errors.is_device(text):
        return "device", npu_errors.device_line(text), FAILED
    cause = error.__cause__
    if cause is not None and (isinstance(cause, OSError) or is_checkpoint_error(cause)):
        return explain(cause)
    return "bug", f"{type(error).__name__}: {error}", FAILED


def is_checkpoint_error(error: BaseException) -> bool:
    """True for torch's CheckpointException, which is no Exception and holds what went wrong on each rank."""
    module = sys.modules.get("torch.distributed.checkpoint.api")  # who has not imported it cannot have raised it
    return module is not None and isinstance(error, module.CheckpointException) and bool(error.failures)


def _file_error(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        return f"{error.filename}: {reason}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{reason}; free some space, and the same command goes on from the newest checkpoint"
    return reason


def main() -> None:
    """Entry point of a rank that `mindspeed-cp train` started."""
    settings = Settings.model_validate_json(sys.argv[1])
    try:
        run_rank(settings, as_json="--json" in sys.argv[2:])
    except BaseException as error:
        kind, line, code = explain(error)
        if kind == "bug":
            traceback.print_exc()
        record(kind, line)
        leave(code)


def leave(code: int) -> None:
    """End this process now: after an error, other threads and process groups may wait for ever."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk, a closed terminal: that is no reason to stay
            stream.flush()
    os._exit(code)


def record(kind: str, line: str) -> None:
    """Tell the launcher, by the file that torch's elastic agent reads; torchrun shows the line in its report."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        line = " ".join(line.split())
        when = _LAST if kind == WILL else int(time.time())
        message: dict[str, Any] = {
            "message": line,
            "extraInfo": {"py_callstack": line, "timestamp": str(when), "kind": kind},
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)


def take_back(kind: str) -> None:
    """Delete what is on record, if it is of this kind."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            found = json.load(file)["message"]["extraInfo"]["kind"]
        if found == kind:
            os.unlink(path)


def _is_memory(error: BaseException) -> bool:
    text = str(error)
    return any(part in text.lower() for part in _MEMORY) and npu_errors.hccl_kind(text) is None


def _too_large(settings: Settings, rank: int) -> ConfigError:
    return ConfigError(
        f"data.seq_length = {settings.data.seq_length}: does not fit, rank {rank} ran out of memory; use less, more "
        "context_parallel_suite.context_parallel_size on more machines, or model.recompute_granularity: full"
    )


if __name__ == "__main__":
    main()
