"""The launch of a training: a launch script is run with recorders in place of programs, which shows the command that
it would really start, and what of it is no training that plans are for.

The script runs in bash in a temporary folder. Its PATH holds tools that only give values (`dirname`, `seq`, ...),
programs that start another one (`nohup`, `srun`, ...), which pass on to what they would start, and recorders: torchrun,
python and the like write down their words and exit with 0. Every other program is recorded, too, and does nothing.
The environment is small, standard input is empty, and there is a time limit. By namespaces of its own (`unshare`) there
is no network and no other process, and nothing that the script writes itself, by redirections, stays: its folder and
the caller's are overlaid, and all else is read-only. Where a system does not allow these, a script is not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from mindspeed_cp.convert.flag_table import ARITIES, OTHER_WORK, names
from mindspeed_cp.errors import ConfigError, shortened

MAX_SCRIPT_BYTES = 2**17  # a launch script has some kilobytes
TIME_LIMIT = 20.0  # seconds
_MAX_LINKS = 2000  # entries of the caller's folder that the script sees by their relative paths

#: Programs that are recorded by name even where the script sets another PATH or calls them by a path.
RECORDED = (
    *("torchrun", "python", "python3", "python2", "msrun", "deepspeed", "accelerate", "ascendspeed", "mindspeed"),
    *("ray", "pip", "pip3", "conda"),
)
#: Programs that start another one, which is looked for among their words.
_STARTERS = (
    *("nohup", "env", "time", "timeout", "nice", "ionice", "setsid", "stdbuf", "unbuffer", "numactl", "taskset"),
    *("sudo", "srun", "mpirun", "mpiexec", "docker", "ssh", "xargs"),
)
#: Programs that give values and change nothing.
_TOOLS = (
    *("cat", "head", "tail", "tac", "wc", "cut", "tr", "sort", "uniq", "paste", "rev", "grep", "egrep", "fgrep", "awk"),
    *("gawk", "mawk", "basename", "dirname", "realpath", "readlink", "seq", "expr", "bc", "date", "uname", "nproc"),
    *("id", "whoami", "ls", "stat", "mktemp", "getopt", "jq", "cmp", "diff", "getconf", "arch", "printenv"),
)

#: Texts of the shell: what seals a run; what every bash reads first; a recorder; a program that starts another one.
_SEAL, _PROFILE, _RECORD, _START = (
    (Path(__file__).parent / "recording" / f"{name}.sh").read_text("utf-8")
    for name in ("seal", "profile", "record", "start")
)

#: Stand-ins for programs whose value is read, or that would write.
_STAND_INS = {
    "tee": "exec cat",
    "sleep": "exit 0",
    "which": 'command -v "$@"',
    "hostname": "case $1 in -i|-I) echo 127.0.0.1 ;; *) echo localhost ;; esac",
    "sed": 'for word; do case $word in -i*|--in-place*|-[nrEsuz]*i*) exit 0 ;; esac; done; exec @SED@ "$@"',
    "mkdir": 'for word; do case $word in -*) ;; *) folder=$(@REALPATH@ -m -- "$word"); '
    'case $folder in @ROOT@/*) @MKDIR@ -p -- "$folder" ;; esac ;; esac; done; exit 0',
}


@dataclass(frozen=True)
class Recording:
    """The commands that a script started.

    Attributes:
        commands: words of each, the program's name first, in the order of their start.
        errors: what the script wrote to its standard error.
        timed_out: True if it was stopped by the time limit.
    """

    commands: tuple[tuple[str, ...], ...]
    errors: str
    timed_out: bool


def record(path: str | Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Recording:
    """Run a script with recorders in place of programs.

    Args:
        path: the script; bash runs it by its absolute path.
        arguments: its arguments.
        environment: variables that it finds, beside HOME, PATH and a few like these.

    Raises:
        ConfigError: the script cannot be read, there is no bash, or the system does not let us run it without effect.
    """
    script = _checked(path)
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError(f"{path}: there is no bash to run it; give the flags behind --, as the training script gets")
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-convert-") as name:
        root = Path(name).resolve()
        seal = _seal(root, (Path.cwd(), script.parent))
        _furnish(root, bash)
        variables = {
            **{"HOME": str(root), "TMPDIR": str(root), "PWD": str(root / "run"), "PATH": str(root / "bin")},
            **{"BASH_ENV": str(root / "profile"), "SHELL": bash, "LANG": "C.UTF-8", "USER": "user", "TERM": "dumb"},
            **(environment or {}),
        }
        errors, timed_out = _run([*seal, bash, str(script), *arguments], root / "run", variables)
        return Recording(_recorded(root), errors, timed_out)


def _checked(path: str | Path) -> Path:
    """Return the absolute path of a script that can be read as text."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
        content.decode("utf-8")
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte, or no UTF-8
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None)
        raise ConfigError(
            f"{path}: cannot be read: {reason or error}; give a launch script, or flags behind --"
        ) from None
    if len(content) > MAX_SCRIPT_BYTES:
        raise ConfigError(f"{path}: is larger than any launch script, {MAX_SCRIPT_BYTES:,} bytes; give flags behind --")
    if b"\0" in content:
        raise ConfigError(f"{path}: is no text; give a launch script, or flags behind --")
    if b"\r\n" in content:
        raise ConfigError(f"{path}: has the line ends of Windows, which bash does not read; convert them by dos2unix")
    return Path(path).resolve()


def _furnish(root: Path, bash: str) -> None:
    """Make programs, and links to the caller's files in the working folder."""
    programs = root / "bin"
    real = {name: shutil.which(name) for name in ("sed", "realpath", "mkdir", *_TOOLS)}
    values = {"BASH": bash, "BIN": programs, "RECORDS": root / "records", "ROOT": root}
    values |= {name.upper(): real[name] or "true" for name in ("sed", "realpath", "mkdir")}

    def fill(text: str, name: str = "") -> str:
        text = text.replace("@NAME@", name)
        return re.sub("@([A-Z]+)@", lambda match: str(values[match[1]]), text)

    def write(name: str, text: str) -> None:
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    (root / "profile").write_text(fill(_PROFILE))
    write(".record", fill(_RECORD).replace('"" "$@"', '"$@"'))
    for name in RECORDED:
        write(name, fill(_RECORD, name))
    for name in _STARTERS:
        write(name, fill(_START, name))
    for name, text in _STAND_INS.items():
        write(name, fill(f"#!@BASH@ -p\n{text}\n"))
    for name in ("bash", "sh", "zsh", "dash"):
        write(name, fill('#!@BASH@ -p\nPATH=@BIN@ exec @BASH@ "$@"\n'))
    for name in _TOOLS:
        if (program := real[name]) is not None:
            (programs / name).symlink_to(program)
    entries = sorted(os.listdir(os.curdir))
    for entry in entries if len(entries) <= _MAX_LINKS else ():
        (root / "run" / entry).symlink_to(Path(entry).absolute())


def _seal(root: Path, folders: Sequence[Path]) -> list[str]:
    """Make the folders of a run, and return the words in front of a command that seal it: it has no network, sees no
    other processes, and writes nothing outside of these folders that stays.

    Raises:
        ConfigError: the system does not let us.
    """
    for name in ("bin", "records", "run"):
        (root / name).mkdir()
    overlaid = [folder for folder in dict.fromkeys(folders) if folder not in root.parents]
    for number in range(1, len(overlaid) + 1):
        for name in ("upper", "work"):
            (root / name / str(number)).mkdir(parents=True)
    unshare, *programs = (shutil.which(name) or "" for name in ("unshare", "sh", "mount", "sleep"))
    spaces = ("--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child")
    words = [unshare, *spaces, programs[0], "-c", _SEAL, "seal", str(root), *programs[1:], *map(str, overlaid), "--"]
    check = [*words, programs[0], "-c", ":"]
    if not unshare or subprocess.run(check, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
        raise ConfigError(
            "a launch script is run without effect, by unshare with namespaces of its own (user, mount, pid, net), "
            "which does not work here; give the flags that the training script gets behind --"
        )
    return words


def _run(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[str, bool]:
    """Run a command; return its last standard error, and True if it took longer than the time limit."""
    with tempfile.TemporaryFile() as errors:
        timed_out = False
        try:  # what is left in the namespace of processes ends with the command
            subprocess.run(
                command, cwd=folder, env=dict(variables), timeout=TIME_LIMIT, start_new_session=True, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            timed_out = True
        errors.seek(max(0, errors.tell() - 2**16))
        return errors.read().decode("utf-8", "replace"), timed_out


def _recorded(root: Path) -> tuple[tuple[str, ...], ...]:
    """Return the recorded commands; paths of a run's own folders are those that a real run has."""
    places = {f"{root}/run": os.getcwd(), f"{root}/bin/": "", str(root): os.path.expanduser("~")}
    files = sorted((root / "records").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    commands = []
    for file in files:
        text = file.read_bytes().decode("utf-8", "surrogateescape")
        for own, real in places.items():
            text = text.replace(own, real)
        commands.append(tuple(text.split("\0")[:-1]))
    return tuple(commands)


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
