"""Which checkpoint a run goes on from; decided before ranks are started, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindspeed_cp.config import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.files import RunFiles
from mindspeed_cp.train.identity import check_same_run

_KEYS = {"step", "tokens", "seconds", "data", "ranks", "identity"}


def checkpoint_to_resume(settings: Settings) -> Path | None:
    """The newest checkpoint of the run's folder, or None where there is none.

    Raises:
        ConfigError: there is one, but it belongs to other settings, is not complete, or must not be resumed
            (checkpoint.resume is false).
    """
    files = RunFiles(Path(settings.output.folder))
    if not files.latest.exists():
        return None
    name = files.latest.read_text(encoding="utf-8").strip()
    folder = files.checkpoints / name
    if not settings.checkpoint.resume:
        raise ConfigError(
            f"checkpoint.resume = false: {files.folder} has the checkpoint {name}, which a new run would mix with "
            "its own; resume it, remove the folder, or give another output.folder"
        )
    run = read_run(folder)
    check_same_run(settings, run["identity"], str(folder))
    return folder


def read_run(folder: Path) -> dict[str, Any]:
    """run.json of a checkpoint.  ConfigError if the checkpoint is not there or not readable."""
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise ConfigError(
            f"{folder}: is not a complete checkpoint (run.json: {reason}); remove it, or restore it"
        ) from None
    if not isinstance(run, dict) or not run.keys() >= _KEYS:
        raise ConfigError(f"{folder}: run.json is not that of this version; give another output.folder")
    return run
