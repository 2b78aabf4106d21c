"""The record through which a rank tells the launcher how it ended, and the end of its process.

The record is the file that torch's elastic agent reads (TORCHELASTIC_ERROR_FILE); torchrun shows its line. A rank on an
NPU or a GPU writes a note of kind EXIT_NOTE before it trains, because the watchdog of HCCL or NCCL may abort the
process at any time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from mindspeed_cp.device import npu_errors
from mindspeed_cp.errors import MESSAGE_LIMIT, shortened

EXIT_NOTE = "exit_note"  # kind of the record while a rank runs on a device
#: Whose watchdog may abort a rank, the library of its operations, and the settings of its time-out, by type of device.
_WATCHDOGS = {
    "npu": ("torch_npu", "an HCCL", npu_errors.TIMEOUTS),
    "cuda": ("torch", "an NCCL", "context_parallel_suite.timeout_seconds"),
}
_LATEST_TIME = 2**31 - 1  # seconds: later than any failure, as torchrun takes the earliest one for the cause of all


def exit_note_text(rank: int, device_type: str) -> str:
    """Return the line of a rank on a device that ended without an error."""
    owner, library, timeouts = _WATCHDOGS[device_type]
    return (
        f"rank {rank} ended without an error message: it was killed, or {owner}'s watchdog aborted it (SIGABRT) "
        f"because {library} operation failed or a peer did not answer within {timeouts}; its standard error names it, "
        "and the same command goes on from the newest checkpoint"
    )


def write_exit_note(kind: str, line: str) -> None:
    """Write the record: the kind of the error (see failures.classify_error, or EXIT_NOTE) and one line."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        line = shortened(" ".join(line.split()), MESSAGE_LIMIT)
        timestamp = _LATEST_TIME if kind == EXIT_NOTE else int(time.time())
        message: dict[str, Any] = {
            "message": line,
            "extraInfo": {"py_callstack": line, "timestamp": str(timestamp), "kind": kind},
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)


def clear_exit_note(kind: str) -> None:
    """Delete the record if it has this kind."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            recorded_kind = json.load(file)["message"]["extraInfo"]["kind"]
        if recorded_kind == kind:
            os.unlink(path)


def exit_process(code: int) -> NoReturn:
    """End this process at once: after an error, other threads and process groups may wait for ever."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk or a closed terminal must not keep the process
            stream.flush()
    os._exit(code)
