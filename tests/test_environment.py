"""requirements/: what is installed, and from where."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    assert NAMES == ["ascend.txt", "cuda.txt", "dev.txt", "npu.txt", "site.txt", "tools.txt", "torch.txt", "triton.txt"]


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
