"""requirements/: what is installed, from where, and how its known faults are looked up."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import pytest
import torch

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
LOCKS = REQUIREMENTS / "lock"
NAMES = sorted(path.name for path in LOCKS.glob("*.txt"))
PIN = re.compile(r"^([\w.-]+)(===?)([\w.+]+)", re.MULTILINE)


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, REQUIREMENTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(path: Path) -> set[tuple[str, str]]:
    """Names and versions of a file and of those that it includes."""
    text = path.read_text("utf-8")
    own = {(name.lower(), version) for name, _, version in PIN.findall(text)}
    return own.union(*(pins(path.parent / name) for name in re.findall(r"^-r (.+)$", text, re.MULTILINE)))


# the locks


def test_every_file_of_pins_has_a_lock() -> None:
    assert NAMES == ["ascend.txt", "cuda.txt", "dev.txt", "npu.txt", "tools.txt", "torch.txt", "triton.txt"]


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_has_every_pin_of_its_file(name: str) -> None:
    """Whoever changes a pin runs `make lock`."""
    assert pins(REQUIREMENTS / name) <= pins(LOCKS / name)


@pytest.mark.parametrize("name", NAMES)
def test_every_package_of_a_lock_has_digests_and_no_index_is_named(name: str) -> None:
    entries = re.sub(r" *\\\n *", " ", (LOCKS / name).read_text("utf-8")).splitlines()
    packages = [line for line in entries if line and not line.startswith(("#", "-r "))]
    assert packages and all(re.search(r"( --hash=sha256:[0-9a-f]{64})+$", line) for line in packages)
    assert not [line for line in entries if line.startswith("-") and not line.startswith("-r ")]


# what pip is asked for


def commands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *failing: int) -> list[str]:
    """Of an installation in which those pip commands fail."""
    module = script("environment")
    asked: list[str] = []

    def run(command: list[Any], **_: Any) -> None:
        asked.append(" ".join(map(str, command)))
        if len(asked) - 1 in failing:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module, "usable", lambda python: True)
    module.install(tmp_path, LOCKS / name, "https://cpu")
    return [command.split("--disable-pip-version-check ")[-1] for command in asked]


LOCKED = "--require-hashes --no-deps"
CPU = f"{LOCKED} -r {LOCKS / 'torch.txt'}"
REST, ITSELF = f"{LOCKED} -r {LOCKS / 'dev.txt'}", f"--no-deps --no-build-isolation -e {REQUIREMENTS.parent}"


@pytest.mark.parametrize(
    ("failing", "torch"),
    [
        ((), [CPU]),
        ((0,), [CPU, f"--index-url https://cpu {CPU}"]),
        ((0, 1), [CPU, f"--index-url https://cpu {CPU}", f"{LOCKED} -r {LOCKS / 'cuda.txt'}"]),
    ],
    ids=["pip's own sources", "the index of CPU builds alone", "PyPI's build"],
)
def test_torch_comes_first_and_from_one_index(
    failing: tuple[int, ...], torch: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commands("dev.txt", tmp_path, monkeypatch, *failing) == [*torch, REST, ITSELF]


def test_the_cuda_environment_has_its_own_torch_and_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, check, itself = commands("cuda.txt", tmp_path, monkeypatch)
    assert first == f"{LOCKED} -r {LOCKS / 'cuda.txt'}" and itself == ITSELF
    assert "torch.version.cuda is None" in check


# the environment with CUDA


def test_the_pins_of_cuda_are_those_of_the_other_environments() -> None:
    cuda, cpu, triton = (dict(pins(REQUIREMENTS / f"{name}.txt")) for name in ("cuda", "torch", "triton"))
    assert cuda["torch"] == cpu["torch"].removesuffix("+cpu") and cuda["triton"] == triton["triton"]
    assert pins(REQUIREMENTS / "dev.txt") <= pins(REQUIREMENTS / "cuda.txt")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_fails_with_one_line() -> None:
    """`make test-cuda` cannot pass by skipping."""
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "VENV", "ARGS", "GPUS")  # of the make that runs these tests
    environment = {name: x for name, x in os.environ.items() if name not in outer and not name.startswith("PYTEST_")}
    make = ["make", "-n", "test-cuda", "GPUS=2"]
    shown = subprocess.run(make, cwd=REQUIREMENTS.parent, env=environment, capture_output=True, text=True).stdout
    (command,) = [line.split() for line in shown.splitlines() if " -m pytest " in line]
    assert command[0] == ".venv-cuda/bin/python"
    words = [sys.executable, *command[1:], "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=REQUIREMENTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = (done.stdout + done.stderr).strip().splitlines()
    why = "torch was built without CUDA" if torch.version.cuda is None else "no device is visible"
    assert line == f"ERROR: --require-cuda 2: {why}"


# known faults


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """audit.py, with PyPI that answers and pip-audit that knows `module.known`."""
    module = script("audit")
    module.known, module.asked = [], []

    def run(command: list[str], **_: Any) -> Any:
        module.asked.append(command)
        if "--output" in command:
            content = {"dependencies": [{"name": "demo", "version": "1.0", "vulns": module.known}]}
            Path(command[command.index("--output") + 1]).write_text(json.dumps(content))
        return SimpleNamespace(returncode=bool(module.known), stderr="")

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module, "unreachable", lambda url: None)
    return module


def test_without_pypi_one_line_says_that_nothing_was_checked(
    audit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()

    def refuse(*_: Any, **__: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr(audit.urllib.request, "urlopen", refuse)
    assert audit.main(str(tmp_path)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("pip-audit: left out, as its data cannot be reached (https://") and "no network" in line


def test_a_known_fault_fails_and_is_named(audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit.known = [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]
    assert audit.main(str(tmp_path)) == 1
    assert "demo 1.0: PYSEC-1, mended in 1.1" in capsys.readouterr().out
    assert not (tmp_path / "audited").exists()


def test_a_check_without_faults_holds_for_a_day(audit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [audit.main(str(tmp_path)) for _ in range(2)] == [0, 0]
    assert len([command for command in audit.asked if "--output" in command]) == 1
    monkeypatch.setattr(audit, "DAY", -1.0)
    assert audit.main(str(tmp_path)) == 0
    assert len([command for command in audit.asked if "--output" in command]) == 2


def test_all_pins_are_asked_for_and_torch_by_its_release() -> None:
    asked = "".join(script("audit").pinned())
    for name in NAMES:
        for package, version in pins(LOCKS / name):
            assert f"{package}=={version.removesuffix('+cpu')}" in asked
    assert "+cpu" not in asked
