"""The launch of a training: the recorded command that starts it, and what is no training that plans are for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from mindspeed_cp.convert.flag_table import ARITIES, OTHER_WORK, names
from mindspeed_cp.convert.recorder import RECORDED, TIME_LIMIT, Recording
from mindspeed_cp.errors import ConfigError, shortened

_SHOWN = 60  # letters of a command in a message
_TRAINS = re.compile(r"train|finetune|sft")


@dataclass(frozen=True)
class Launch:
    """Words of the command that starts the training.

    Attributes:
        launcher: words up to the training script, as of torchrun; empty without a script.
        entry: the training script or module; None if none is seen.
        words: words behind it.
        name: of the launch script, for errors and comments; None without one.
        notes: remarks on what else was recorded.
    """

    launcher: tuple[str, ...]
    entry: str | None
    words: tuple[str, ...]
    name: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def flags(self) -> frozenset[str]:
        """Names of the flags behind the training script."""
        return frozenset(word.partition("=")[0] for word in self.words)

    @property
    def is_megatrons(self) -> bool:
        """True if some flag is of the table."""
        return not self.flags.isdisjoint(ARITIES)


def find_launch(recording: Recording, name: str) -> Launch:
    """Return the command of a recording that starts the training.

    Args:
        recording: of the script.
        name: the script's name, for errors.

    Raises:
        ConfigError: the script starts nothing, no training, or several with different words.
    """
    launches = [launch for words in recording.commands if (launch := _read(words, name)) is not None]
    trainings = list(dict.fromkeys(launch for launch in launches if launch.is_megatrons and not other_work(launch)))
    if not trainings:
        raise ConfigError(f"{name}: {_why_none(recording, launches, name)}")
    if len(trainings) > 1:
        starts = (shortened(" ".join((launch.entry or "", *launch.words)), _SHOWN) for launch in trainings)
        listed = "; ".join(f"{number}: {text}" for number, text in enumerate(starts, 1))
        raise ConfigError(f"{name}: starts {len(trainings)} trainings, {listed}; give the flags of one behind --")
    notes = []
    programs = [  # program texts for Python, whose output the script may read
        shortened(" ".join(words), _SHOWN)
        for words in recording.commands
        if words[0].startswith("python") and (len(words) == 1 or words[1] in ("-c", "-"))
    ]
    if programs:
        shown = ", ".join(dict.fromkeys(programs))
        notes.append(f"not run, so that what the script reads from it is empty: {shown}")
    if recording.timed_out:
        notes.append(f"the script was stopped after {TIME_LIMIT:.0f} s; what it starts later was not recorded")
    return replace(trainings[0], notes=tuple(notes))


def other_work(launch: Launch) -> str | None:
    """Return what a launch does in place of a PyTorch training; None for a training."""
    program = PurePosixPath(launch.launcher[0]).name if launch.launcher else ""
    framework = dict(zip(launch.words, launch.words[1:], strict=False)).get("--ai-framework", "")
    if program == "msrun" or framework == "mindspore" or "--ai-framework=mindspore" in launch.words:
        return "a training by MindSpore, and plans are for PyTorch"
    stem = "" if launch.entry is None else PurePosixPath(launch.entry.replace(".", "/").removesuffix("/py")).name
    words = "" if _TRAINS.search(stem) else re.sub(r"[^a-zA-Z]+", " ", stem)
    by_name = [row["work"] for row in OTHER_WORK if re.search(rf"\b({row['words']})", words)]
    by_flag = [row["work"] for row in OTHER_WORK if not launch.flags.isdisjoint(names(row["flags"]))]
    return next((f"{work}, no training" for work in (*by_name, *by_flag)), None)


def _read(words: Sequence[str], name: str) -> Launch | None:
    """Return a command as a launch, whose training script (.py) or module (-m) is the first; None without flags."""
    runs_python = PurePosixPath(words[0]).name.startswith(("python", *RECORDED))
    for position, word in enumerate(words):
        follows = words[position + 1 : position + 2]
        is_module = word in ("-m", "--module") and bool(follows) and not follows[0].startswith("torch.")
        if (is_module and runs_python) or (word.endswith(".py") and not word.startswith("--")):
            entry = position + is_module
            return Launch(tuple(words[:entry]), words[entry], tuple(words[entry + 1 :]), name)
    start = next((position for position, word in enumerate(words) if word.startswith("--")), None)
    return None if start is None else Launch(tuple(words[:start]), None, tuple(words[start:]), name)


def _why_none(recording: Recording, launches: Sequence[Launch], name: str) -> str:
    """Return why a script has no training, and what to give instead."""
    for launch in launches:
        if (work := other_work(launch)) is not None:
            return (
                f"{launch.entry or launch.launcher[0]} is {work}; give the script that starts a training with "
                "PyTorch, or its flags behind --"
            )
    instead = "give the script that starts the training, or flags behind --"
    if launches:
        shown = shortened(launches[0].entry or " ".join(launches[0].launcher), _SHOWN)
        return f"{shown}, which it starts, gets no flag of Megatron's; {instead}"
    lines = [line for line in recording.errors.splitlines() if line.strip()]
    reason = f" in {TIME_LIMIT:.0f} s" if recording.timed_out else ""
    if lines:
        reason += f"; its last message: {shortened(lines[-1], 200).replace(str(Path(name).resolve()), name)}"
    return f"starts no program with flags{reason}; --env NAME=VALUE gives a variable; or {instead}"
