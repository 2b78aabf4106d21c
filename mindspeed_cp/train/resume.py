"""Which checkpoint a run goes on from; decided before ranks are started, without torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mindspeed_cp.config import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.files import RunFiles, folder_setting, read_metrics, reason
from mindspeed_cp.train.identity import check_same_run

_NAME = re.compile(r"iter_(\d{7,})")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "tokens": int,
    "seconds": (int, float),
    "data": (dict, type(None)),
    "ranks": int,
    "identity": dict,
}


def checkpoint_to_resume(settings: Settings) -> Path | None:
    """The newest checkpoint of the run's folder, or None where there is none.

    Raises:
        ConfigError: there is one, but it belongs to other settings, is not complete, or must not be resumed
            (checkpoint.resume is false); or `latest` or metrics.jsonl are damaged.
    """
    files = RunFiles(Path(settings.output.folder))
    name = _read_latest(files)
    if name is not None and not settings.checkpoint.resume:
        raise ConfigError(
            f"checkpoint.resume = false: {files.folder} has the checkpoint {name}, which a new run would mix with "
            "its own; resume it, remove the folder, or give another output.folder"
        )
    read_metrics(files.metrics)  # a run that goes on needs them; damage is told now and not when ranks have started
    if name is None:
        return None
    folder = files.checkpoints / name
    run = read_run(folder)
    check_same_run(settings, run["identity"], str(folder))
    return folder


def read_run(folder: Path) -> dict[str, Any]:
    """run.json of a checkpoint.  ConfigError if the checkpoint is not there or not readable."""
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or "it is not JSON"
        raise ConfigError(f"{folder}: is not a complete checkpoint (run.json: {found}); {what_else(folder)}") from None
    wrong = _TYPES.keys() if not isinstance(run, dict) else [k for k, t in _TYPES.items() if not _is(run, k, t)]
    if wrong:
        raise ConfigError(
            f"{folder}: run.json is damaged or not that of this version ({', '.join(wrong)} missing or of another "
            f"type); {what_else(folder)}"
        )
    return run


def what_else(folder: Path) -> str:
    """What to do about a checkpoint that cannot be used: go on from the newest complete one before it."""
    older = [
        path
        for path in checkpoints_in(folder.parent)
        if step_of(path) < step_of(folder) and (path / "run.json").exists()
    ]
    if not older:
        return f"there is no older checkpoint in {folder.parent}: restore this one, or give another output.folder"
    return f"restore it, or go on from the one before: write {older[-1].name} into {folder.parent / 'latest'}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, complete or not, oldest first."""
    return sorted((path for path in folder.glob("iter_*") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was written, from its name."""
    return int(folder.name.removeprefix("iter_"))


def _is(run: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> bool:
    return key in run and isinstance(run[key], kind) and not isinstance(run[key], bool)


def _read_latest(files: RunFiles) -> str | None:
    """The name in the file `latest`; None if there is no such file."""
    try:
        name = files.latest.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        name = ""
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder_setting(files.folder)}: cannot be read: {reason(error)}; give another folder"
        ) from None
    if _NAME.fullmatch(name):
        return name
    known = ", ".join(path.name for path in checkpoints_in(files.checkpoints)) or "none is there"
    raise ConfigError(
        f"{files.latest}: is damaged, it must name a checkpoint ({known}); write one's name into it, or give another "
        "output.folder"
    )
