"""What runs in Python around torch in a step: the few calls that make or move a tensor, and no operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_few_calls_of_a_step_are_redirected(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.redirect", "--steps", "1", "--layers", "1", "--json", str(figures)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    counted = json.loads(figures.read_text())
    assert 0 < counted["replaced_calls"] < counted["mode_calls"] / 5
