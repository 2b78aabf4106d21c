"""The output of the ranks of this machine: a file for each, rank 0 also on the screen."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.run_files import error_text

LOGS_VARIABLE = "MINDSPEED_CP_LOGS"  # the folder that our launcher chose
_CHUNK = 2**16
_DRAIN_SECONDS = 1.0  # a process that the rank started may still hold its output


def open_log(folder: Path, rank: int) -> int:
    """Return a handle that appends to the log of a rank. The folder is created; a file that is a link is refused.

    Raises:
        ConfigError: it cannot be written.
    """
    path = log_path(folder, rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"{path}: the log of rank {rank} cannot be written: {error_text(error)}; move it away, or give another "
            "output.folder"
        ) from None


def open_own_log(folder: Path) -> TextIO:
    """Return the log of rank 0, to append text; in the folder that our launcher chose, or else in this one."""
    chosen = os.environ.get(LOGS_VARIABLE)
    return os.fdopen(open_log(Path(chosen) if chosen else folder, 0), "w", encoding="utf-8")


def log_path(folder: Path, rank: int) -> Path:
    """Return the path of the log of a rank."""
    return folder / f"rank{rank}.log"


class RankLogs:
    """Starts the ranks with their output in files; later starts append to them.

    Rank 0 keeps the standard output of this process, which may be a terminal with a progress bar: it writes the same
    lines into its log itself. The standard error of a node's first rank passes through this process, to the screen and
    to the log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copier: threading.Thread | None = None

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the rank that RANK of the environment names."""
        rank, local = int(env["RANK"]), int(env["LOCAL_RANK"])
        env = {**env, LOGS_VARIABLE: str(self._folder)}
        log = open_log(self._folder, rank)
        try:
            os.write(log, f"--- start at {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode())
            if local:
                return subprocess.Popen(command, env=env, stdout=log, stderr=log)
            output = log if rank else None
            process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.PIPE, bufsize=0)
            self._copier = threading.Thread(target=_copy, args=(process, os.dup(log)), daemon=True)
            self._copier.start()
            return process
        finally:
            os.close(log)

    def close(self) -> None:
        """Wait for the last words of a rank that has ended."""
        if self._copier is not None:
            self._copier.join(_DRAIN_SECONDS)


def _copy(process: subprocess.Popen[bytes], log: int) -> None:
    """Copy the standard error of a rank to that of this process and to its log, until it ends."""
    assert process.stderr is not None
    with process.stderr as stream, os.fdopen(log, "wb", buffering=0) as file:
        while chunk := stream.read(_CHUNK):
            with suppress(OSError):  # a closed terminal
                os.write(2, chunk)
            with suppress(OSError):  # a full disk
                file.write(chunk)
