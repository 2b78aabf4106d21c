"""The files of a run: where they are, and how they are written so that no reader ever sees half of one.

<output.folder>/
  settings.yaml  metrics.jsonl  loss.png  summary.json  .lock
  trace/         of the steps of output.trace_steps
  checkpoints/   iter_0000050/ (Megatron's shards, run.json)   latest

settings.yaml has the settings of the last start that finished a step.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_cp.errors import ConfigError


class DiskError(OSError):
    """A file cannot be written while a run is under way: carries errno, a line with what to do, and the folder."""


@dataclass(frozen=True)
class RunFiles:
    """Paths of one run.  A leading ~ of the folder is the home folder.

    Raises:
        ConfigError: the folder starts with ~user, and there is no such user.
    """

    folder: Path

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "folder", self.folder.expanduser())
        except RuntimeError:
            raise ConfigError(
                f"output.folder = {self.folder}: there is no such user's home folder; write the path in full"
            ) from None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def latest(self) -> Path:
        """Holds the name of the newest complete checkpoint."""
        return self.checkpoints / "latest"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def loss_png(self) -> Path:
        return self.folder / "loss.png"

    @property
    def settings(self) -> Path:
        return self.folder / "settings.yaml"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.json"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after a step."""
        return self.checkpoints / f"iter_{step:07d}"

    def make(self) -> None:
        """Make the folders and try to write into them.  ConfigError if that cannot be done."""
        failed = "made"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            failed = "written to"
            for folder in (self.folder, self.checkpoints):
                with tempfile.TemporaryFile(dir=folder) as probe:
                    probe.write(b"probe")
        except (OSError, ValueError) as error:  # ValueError: a path that no system call takes
            raise ConfigError(
                f"{folder_setting(self.folder)}: cannot be {failed}: {reason(error)}; give another folder"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of the folder while this block runs; the system lifts the lock if the process dies.

        Raises:
            ConfigError: another run is using the folder.
        """
        with open(self.folder / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"output.folder = {self.folder}: another run is using it; wait for its end, or give another folder"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield


def folder_setting(folder: Path) -> str:
    """`output.folder = ...` on one line, whatever characters it has."""
    text = str(folder)
    return f"output.folder = {text if text.isprintable() else repr(text)}"


def reason(error: BaseException) -> str:
    """What went wrong, on one line, without the path that an OSError repeats."""
    lines = (getattr(error, "strerror", None) or str(error)).split("\n")
    return lines[0].strip()[:200] or type(error).__name__


def disk_error(error: BaseException, folder: Path) -> DiskError:
    """The error to raise when `error` ended the writing of something in a folder."""
    return DiskError(
        getattr(error, "errno", None) or errno.EIO,
        f"cannot be written: {reason(error)}; make room or give access, and the same command goes on from the newest "
        "checkpoint",
        str(folder),
    )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn every OSError of this block into a DiskError that names the folder."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise disk_error(error, folder) from None


def write_text(path: Path, text: str) -> None:
    """Replace a file at once: readers see the old text or the new one, also after a power cut.

    Raises:
        DiskError: it cannot be written; the old text stays.
    """
    temporary = path.with_name(f".{path.name}.new")
    with writing(path.parent):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by JSON, at once."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; none if there is no file.  A last line that a crash cut short is left out.

    Raises:
        ConfigError: another line is damaged, or the file cannot be read.
    """
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {reason(error)}; make it readable, or move it away") from None
    found = []
    for number, line in enumerate(lines, 1):
        value = _metrics_line(line)
        if value is None:
            raise ConfigError(
                f"{path}: line {number} is damaged: {line[:40]!r} is no JSON mapping with a whole number `step`; "
                "mend or remove that line"
            )
        found.append(value)
    value = _metrics_line(last)
    return found if value is None else [*found, value]


def _metrics_line(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


def keep_metrics(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Drop the lines behind a step, so that a resumed run writes each step once.  Returns the lines that stay."""
    kept = [line for line in read_metrics(path) if line["step"] <= last_step]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
