"""The reference for what a script hands over: bash runs it, with commands that write down their words."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

BASH = shutil.which("bash")

needs_bash = pytest.mark.skipif(BASH is None, reason="bash is not installed")

_RECORDER = """#!{bash}
printf '%s\\0' "${{0##*/}}" "$@" > {record}
"""
_SRUN = """#!{bash}
while [ "$1" != sh ]; do shift; done
exec "$@"
"""


def words_by_bash(script: Path, folder: Path, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the words of the last command that a script starts, its name first.

    Args:
        script: the script.
        folder: an empty folder for files.
        environment: variables that the caller of the script sets.
    """
    programs, record = folder / "bin", folder / "record"
    programs.mkdir(parents=True)
    for name in ("torchrun", "python", "python3", "record"):
        (programs / name).write_text(_RECORDER.format(bash=BASH, record=record))
    (programs / "srun").write_text(_SRUN.format(bash=BASH))
    for program in programs.iterdir():
        program.chmod(0o755)
    assert BASH is not None
    variables = {"PATH": f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin", **(environment or {})}
    subprocess.run([BASH, str(script.resolve())], cwd=folder, env=variables, check=False, capture_output=True)
    return record.read_bytes().decode().split("\0")[:-1]
