"""The scripts start a training on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch_scripts.scripts import (
    A2,
    ROOT,
    SLURM,
    run,
)
from tests.limits import HANG
from tests.ports import free_port


def tiny(folder: Path, steps: int = 2) -> list[str]:
    """Two ranks on the CPU, and a model for which a step takes no time."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": "ring of ranks " * (n % 7 + 1)}) + "\n" for n in range(40)))
    settings = {
        "output.folder": folder / "run",
        "output.log_interval": "0",
        "data.corpus": corpus,
        "data.seq_length": 128,
        "model.hidden_size": 32,
        "train.train_iters": steps,
        "train.lr_warmup_iters": 0,
        "train.threads_per_rank": 1,
        "context_parallel_suite.context_parallel_size": 2,
        "context_parallel_suite.timeout_seconds": HANG,
    }
    return ["--device=cpu", *(f"--set={name}={value}" for name, value in settings.items())]


def steps_of(folder: Path) -> list[int]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.thorough  # the two below show all of it but the summary
def test_one_node_trains(tmp_path: Path) -> None:
    words = [*tiny(tmp_path), "--ranks-per-node=2"]
    done = run(A2, *words, "--", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path) == [1, 2]
    assert json.loads(next(tmp_path.glob("run/checkpoints/iter_*/manifest.json")).read_text())["record"]["ranks"] == 2
    assert json.loads(done.stdout)["step"] == 2


def test_two_nodes_of_a_slurm_job_train_together(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Both on this machine, by a double of srun."""
    port = free_port()
    words = [*tiny(tmp_path), "--machine=a3", "--ranks-per-node=1", "--interface=lo", f"--master-port={port}"]
    done = run(SLURM, *words, "--set=context_parallel_suite.nodes=2", cwd=tmp_path, **slurm)
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path) == [1, 2]
    assert len(list(tmp_path.glob("run/logs/slurm-1234567/**/stdout.log"))) == 2


def _takes_interrupts() -> None:
    """As a terminal's shell leaves it; a shell that runs the tests in the background has them ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.thorough  # tests/faults sends the launcher a SIGINT by default
def test_ctrl_c_ends_the_step_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the launcher and to the ranks, and the launcher another signal to these."""
    words = [*tiny(tmp_path, steps=100000), "--ranks-per-node=2"]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        ["bash", str(A2), *words],
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=_takes_interrupts,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while len(steps_of(tmp_path)) < 3 and process.poll() is None:  # the handler stands before the first step
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=HANG)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0 and re.search(r"stopped by \w+ after step \d+", out), out
    last = steps_of(tmp_path)[-1]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == f"iter_{last:07d}"
