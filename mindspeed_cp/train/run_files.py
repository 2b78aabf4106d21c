"""The files of a run: their paths, and writing that never shows a reader an incomplete file.

<output.folder>/
  settings.yaml  metrics.jsonl  summary.json  .lock
  trace/         steps of output.trace_steps, as torch.profiler saw them
  tensorboard/   events (output.tensorboard)
  checkpoints/   iter_0000050/   latest

settings.yaml holds the settings of the last start that finished a step.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.files import replace_file


class RunFiles:
    """Paths of one run. A leading ~ of the folder means the home folder.

    Attributes:
        folder: output.folder.
        checkpoints, latest: folder of the checkpoints, and the file with the name of the newest one.
        tensorboard: folder of TensorBoard's events.
        metrics, settings, summary: the other files of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.expanduser(folder))
        self.checkpoints = self.folder / "checkpoints"
        self.latest = self.checkpoints / "latest"
        self.tensorboard = self.folder / "tensorboard"
        self.metrics = self.folder / "metrics.jsonl"
        self.settings = self.folder / "settings.yaml"
        self.summary = self.folder / "summary.json"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after a step."""
        return self.checkpoints / f"iter_{step:07d}"

    def create(self) -> None:
        """Create the folders. Raise ConfigError if that fails."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a path that no system call accepts
            raise ConfigError(
                f"{describe_folder(self.folder)}: cannot be created: {error_text(error)}; give another folder"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder while this block runs; the system releases the lock if the process dies.

        Raises:
            ConfigError: Another run is using the folder, or it cannot be written to.
        """
        try:
            lock = open(self.folder / ".lock", "a")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise ConfigError(
                f"{describe_folder(self.folder)}: cannot be written to: {error_text(error)}; give another folder"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"output.folder = {self.folder}: another run is using it; wait for its end, or give another folder"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield


def describe_folder(folder: Path) -> str:
    """Return `output.folder = ...` on one line, for any characters in the path."""
    text = str(folder)
    return f"output.folder = {text if text.isprintable() else repr(text)}"


def error_text(error: BaseException) -> str:
    """Return the message of an error on one line, without the path of an OSError."""
    lines = (getattr(error, "strerror", None) or str(error)).split("\n")
    return lines[0].strip()[:200] or type(error).__name__


def disk_error(error: BaseException, folder: Path) -> OSError:
    """Return the error with the remedy for one that ended a write into a folder."""
    return OSError(
        getattr(error, "errno", None) or errno.EIO,
        f"cannot be written: {error_text(error)}; make room or give access, and the same command goes on from the "
        "newest checkpoint",
        str(folder),
    )


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old or the new text, also after a power failure; all names in its
    folder are made durable.

    Raises:
        OSError: It cannot be written; the old text stays.
    """

    def write(new: Path) -> None:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    try:
        replace_file(path, write)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise disk_error(error, path.parent) from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, none without a file. An incomplete last line is left out.

    Raises:
        ConfigError: Another line is damaged, or the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error_text(error)}; make it readable, or move it away") from None
    values = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and type(value.get("step")) is int:
            values.append(value)
        elif line.endswith(b"\n"):
            raise ConfigError(
                f"{path}: line {number} is damaged: {line.strip()[:40]!r} is no JSON mapping with a whole number "
                "`step`; mend or remove that line"
            )
    return values


def truncate_metrics(path: Path, last_step: int) -> None:
    """Remove the lines after a step, so that a resumed run writes each step once."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= last_step))
