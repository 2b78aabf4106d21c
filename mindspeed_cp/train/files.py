"""The files of a run: where they are, and how they are written so that no reader ever sees half of one.

<output.folder>/
  settings.yaml  metrics.jsonl  loss.png  summary.json  .lock
  checkpoints/   iter_0000050/ (Megatron's shards, run.json)   latest
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_cp.errors import ConfigError


@dataclass(frozen=True)
class RunFiles:
    """Paths of one run."""

    folder: Path

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
        """Make the folders.  ConfigError if they cannot be made."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output.folder = {self.folder}: cannot be made: {error.strerror}") from None

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


def write_text(path: Path, text: str) -> None:
    """Replace a file at once: readers see the old text or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
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
    """The lines of metrics.jsonl; none if there is no file.  A last line that a crash cut short is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def keep_metrics(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Drop the lines behind a step, so that a resumed run writes each step once.  Returns the lines that stay."""
    kept = [line for line in read_metrics(path) if line["step"] <= last_step]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
