"""`mindspeed-cp train` as people run it: a launcher and its ranks as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.train.run_files import read_metrics
from tests.limits import HANG, wait_until

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "mindspeed_cp.cli.main", "train"]


def write(settings: Settings, folder: Path) -> Path:
    """Write settings into a file of a folder."""
    path = folder / "settings.yaml"
    path.write_text(settings.model_dump_json())  # JSON is YAML
    return path


class Run:
    """A command in the background."""

    def __init__(self, *command: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll until the condition holds, and return its value; fail if the run ends before."""

        def check() -> None:
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode} before {what}: {self.process.communicate()}")

        return wait_until(condition, what, check)

    def wait_for_step(self, folder: Path, step: int) -> None:
        """Wait until a step is in metrics.jsonl."""
        self.wait_for(lambda: len(read_metrics(folder / "metrics.jsonl")) >= step, f"step {step}")

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in their order."""
        return psutil.Process(self.process.pid).children()

    def end(self) -> tuple[int, str, list[str]]:
        """Return exit code, output, and lines of standard error."""
        out, err = self.process.communicate(timeout=HANG)
        return self.process.returncode, out, err.splitlines()

    def close(self) -> None:
        """Kill the command and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
