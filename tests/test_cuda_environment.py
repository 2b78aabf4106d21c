"""`make test-cuda` without a GPU: what it runs, and that it cannot pass by skipping."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"


def pins(name: str) -> dict[str, str]:
    """Packages of one file, without those that it includes."""
    return dict(re.findall(r"^([\w-]+)===?([\w.]+)", (REQUIREMENTS / name).read_text(), re.MULTILINE))


def test_the_pins_are_those_of_the_other_environments() -> None:
    own_pins = pins("cuda.txt")
    assert own_pins["torch"] == pins("torch.txt")["torch"].removesuffix("+cpu")
    assert own_pins["triton"] == pins("triton.txt")["triton"]
    assert "-r dev.txt\n" in (REQUIREMENTS / "cuda.txt").read_text()


def command_of(*arguments: str) -> list[str]:
    """The pytest of `make test-cuda`, in this environment."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "VENV", "ARGS", "GPUS")  # of the make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    make = ["make", "-n", "test-cuda", *arguments]
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if " -m pytest " in line]
    python, *rest = line.split()
    assert python == ".venv-cuda/bin/python"
    return [sys.executable, *rest]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_fails_with_one_line() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [*command_of("GPUS=2"), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = (done.stdout + done.stderr).strip().splitlines()
    why = "torch was built without CUDA" if torch.version.cuda is None else "no device is visible"
    assert line == f"ERROR: --require-cuda 2: {why}"


@pytest.mark.parametrize(
    ("count", "capability", "asked", "says"),
    [
        (1, (9, 0), 2, "--require-cuda 2: fewer CUDA devices are visible, 1"),
        (2, (7, 5), 2, "compute capability 7.5; valid: 8.0 or later"),
        (2, (9, 0), 0, "--require-cuda 0: valid: 1 or more"),
        (2, (9, 0), 2, None),
        (2, (9, 0), 1, None),
    ],
)
def test_what_counts_as_a_gpu(
    count: int, capability: tuple[int, int], asked: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.conftest import pytest_configure

    for name, value in {
        "is_available": True, "device_count": count, "get_device_name": "x", "get_device_capability": capability,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr("mindspeed_cp.ops.attention.cuda.flash_operator.has_triton", lambda: True)

    class Config:
        @staticmethod
        def getoption(name: str) -> int | None:
            return asked if name == "require_cuda" else None

    config: Any = Config()
    if says is None:
        pytest_configure(config)
        return
    with pytest.raises(pytest.UsageError) as error:
        pytest_configure(config)
    assert says in str(error.value)


def test_the_page_shows_the_same_command() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    assert " ".join(command_of("GPUS=1")[1:]) in page
