"""The checkpoints that a run may resume from; found before ranks are started, without torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.schema.messages import format_value
from mindspeed_cp.train.checkpoint_digests import DamagedCheckpointError, UnsignedCheckpointError, read_digests
from mindspeed_cp.train.run_files import RunFiles, describe_folder, error_text, iter_metrics
from mindspeed_cp.train.run_identity import check_same_run

LARGEST = 2**63  # no count of tokens, and no time in seconds, reaches it
_NAME = re.compile(r"iter_(\d{7,})")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "tokens": int,
    "seconds": (int, float),
    "data": (dict, type(None)),
    "ranks": int,
    "identity": dict,
}


def checkpoints_to_resume(settings: Settings) -> tuple[dict[Path, dict[str, str]], list[str]]:
    """Return the checkpoints that a run may resume from, the best one first, each with the digests of its files (none
    where checkpoint.trust_unsigned accepts it without), and what is to be told about the choice.

    The best one is the one that `latest` names, or the newest one where `latest` is lost; older ones follow, to fall
    back on, and last those after a spike of the loss. Complete are those that have a run.json and digests; whether
    their files are whole is not looked at.

    Raises:
        ConfigError: there are some, but none is complete, the best one belongs to other settings or was not signed by
            this user, or none may be resumed (checkpoint.resume is false); or metrics.jsonl is damaged.
    """
    files = RunFiles(Path(settings.output.folder))
    name, notes = read_latest(files)
    folders = [path for path in reversed(list_checkpoints(files.checkpoints)) if not path.is_symlink()]
    if (folders or name) and not settings.checkpoint.resume:
        raise ConfigError(
            f"checkpoint.resume = false: {files.folder} has the checkpoint {name or folders[0].name}, which a new run "
            "would mix with its own; leave --no-resume out to go on from it, or give another output.folder"
        )
    for _ in iter_metrics(files.metrics):  # a resumed run needs them; report damage before ranks are started
        pass
    if name is not None:
        newest = checkpoint_step(Path(name))
        folders = [path for path in folders if checkpoint_step(path) <= newest]
        if not folders or folders[0].name != name:
            notes.append(f"{files.checkpoints / name}, which `latest` names, is gone")
    complete: dict[Path, dict[str, str]] = {}
    spikes: dict[Path, dict[str, str]] = {}
    saved_identity: dict[str, Any] = {}
    for folder in folders:
        try:
            run = read_run_json(folder)
            digests = read_digests(folder, trust_unsigned=settings.checkpoint.trust_unsigned) or {}
        except (DamagedCheckpointError, UnsignedCheckpointError) as error:
            if not complete and not spikes and isinstance(error, UnsignedCheckpointError):
                raise
            notes.append(f"{folder}: is damaged ({error})")
            continue
        if not complete and not spikes:
            knows_contents = "contents" in (run["data"] or {})
            check_same_run(settings, run["identity"], str(folder), knows_contents=knows_contents)
            saved_identity = run["identity"]
        if run["identity"] == saved_identity:
            (spikes if run.get("spike") else complete)[folder] = digests
    complete |= spikes
    if (folders or name is not None) and not complete:
        raise ConfigError(
            f"{'; '.join(notes)}; no whole checkpoint is left in {files.checkpoints}: restore one, or give another "
            "output.folder"
        )
    return complete, notes


def read_run_json(folder: Path, step: int | None = None) -> dict[str, Any]:
    """Return run.json of a checkpoint.

    Args:
        folder: the checkpoint.
        step: of the checkpoint; None: that of the folder's name.

    Raises:
        DamagedCheckpointError: it is missing or damaged, or of another step than the folder.
    """
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or "it is not JSON"
        raise DamagedCheckpointError(f"run.json: {problem}") from None
    wrong = _TYPES.keys() if not isinstance(run, dict) else [k for k, t in _TYPES.items() if not _is(run, k, t)]
    if wrong:
        raise DamagedCheckpointError(
            f"run.json is damaged or not that of this version: {', '.join(wrong)} missing or of another type"
        )
    for key in ("tokens", "seconds", "ranks"):
        if not (key == "ranks") <= run[key] < LARGEST:
            raise DamagedCheckpointError(f"run.json is damaged: {key} is {format_value(run[key])}")
    if run["step"] != (checkpoint_step(folder) if step is None else step):
        raise DamagedCheckpointError(f"run.json is of step {format_value(run['step'])}")
    return run


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, complete or not, oldest first."""
    return sorted((path for path in folder.glob("iter_*") if _NAME.fullmatch(path.name)), key=checkpoint_step)


def checkpoint_name(text: str) -> str:
    """Return the name of a checkpoint that another rank sent; raise PeerError if it is none."""
    if not _NAME.fullmatch(text):
        raise PeerError(f"the first rank names {format_value(text)}, which is no checkpoint")
    return text


def checkpoint_step(folder: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(folder.name.removeprefix("iter_"))


def _is(run: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> bool:
    return key in run and isinstance(run[key], kind) and not isinstance(run[key], bool)


def read_latest(files: RunFiles) -> tuple[str | None, list[str]]:
    """Return the name in the file `latest`, or None where it is missing or damaged, and notes for the user."""
    try:
        name = files.latest.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        problem = "is missing"
    except UnicodeDecodeError:
        problem = "is damaged"
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{describe_folder(files.folder)}: cannot be read: {error_text(error)}; give another folder"
        ) from None
    else:
        if _NAME.fullmatch(name):
            return name, []
        problem = "is damaged"
    if problem == "is missing" and not list_checkpoints(files.checkpoints):
        return None, []
    return None, [f"{files.latest}: {problem}, so the newest whole checkpoint is taken"]
