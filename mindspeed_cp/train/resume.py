"""The checkpoint that a run resumes from; found before ranks are started, without torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.run_files import RunFiles, describe_folder, error_text, read_metrics
from mindspeed_cp.train.run_identity import check_same_run

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
    """Return the newest checkpoint of the run's folder, or None.

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
    read_metrics(files.metrics)  # a resumed run needs them; report damage before ranks are started
    if name is None:
        return None
    folder = files.checkpoints / name
    run = read_run_json(folder)
    check_same_run(settings, run["identity"], str(folder))
    return folder


def read_run_json(folder: Path) -> dict[str, Any]:
    """Return run.json of a checkpoint; raise ConfigError if it is missing or damaged."""
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "it is not JSON"
        raise ConfigError(
            f"{folder}: is not a complete checkpoint (run.json: {problem}); {recovery_hint(folder)}"
        ) from None
    wrong = _TYPES.keys() if not isinstance(run, dict) else [k for k, t in _TYPES.items() if not _is(run, k, t)]
    if wrong:
        raise ConfigError(
            f"{folder}: run.json is damaged or not that of this version ({', '.join(wrong)} missing or of another "
            f"type); {recovery_hint(folder)}"
        )
    return run


def recovery_hint(folder: Path) -> str:
    """Return the advice for a damaged checkpoint: resume from the newest complete one before it."""
    older = [
        path
        for path in list_checkpoints(folder.parent)
        if checkpoint_step(path) < checkpoint_step(folder) and (path / "run.json").exists()
    ]
    if not older:
        return f"there is no older checkpoint in {folder.parent}: restore this one, or give another output.folder"
    return f"restore it, or go on from the one before: write {older[-1].name} into {folder.parent / 'latest'}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, complete or not, oldest first."""
    return sorted((path for path in folder.glob("iter_*") if _NAME.fullmatch(path.name)), key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(folder.name.removeprefix("iter_"))


def _is(run: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> bool:
    return key in run and isinstance(run[key], kind) and not isinstance(run[key], bool)


def _read_latest(files: RunFiles) -> str | None:
    """Return the name in the file `latest`, or None without the file."""
    try:
        name = files.latest.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        name = ""
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{describe_folder(files.folder)}: cannot be read: {error_text(error)}; give another folder"
        ) from None
    if _NAME.fullmatch(name):
        return name
    known = ", ".join(path.name for path in list_checkpoints(files.checkpoints)) or "none is there"
    raise ConfigError(
        f"{files.latest}: is damaged, it must name a checkpoint ({known}); write one's name into it, or give another "
        "output.folder"
    )
