"""mindspeed-cp calibrate --device npu over the stand-in: it runs on two NPUs and writes a preset that loads.

The speeds are the stand-in's; what is tested is that NPUs are waited for, that links go over HCCL, and what is counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_cp.cluster import load_cluster
from tests.npu.commands import run_commands

ROOT = Path(__file__).resolve().parent.parent.parent
#: fp32, as a CPU without bf16 of its own takes minutes for one of the products.
SMALL = ("--seconds", "0.2", "--longest", "1024", "--heads", "4", "--head-dim", "64", "--dtype", "fp32")


def calibrate(out: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and messages."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **environment}
    command = [sys.executable, "-m", "tests.npu.command", "calibrate", str(out), "--device", "npu", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.thorough  # half a minute: a fit of shorter measurements fails by their noise
def test_two_npus_are_measured(tmp_path: Path) -> None:
    code, out, messages = calibrate(tmp_path / "mine.yaml", *SMALL, "--base", "a2", "--json", HOST_CANN_DEVICES="2")
    assert code == 0, messages[-3000:]
    report = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    cluster, base = load_cluster(tmp_path / "mine.yaml"), load_cluster("a2")
    assert cluster.ranks_per_node == 2 and cluster.peak_flops == base.peak_flops and cluster.memory == base.memory
    assert set(report["fits"]) == {"attention", "linear", "in_node"}
    measured = {key for key, source in report["sources"].items() if source == "measured"}
    assert {"launch", "attention_efficiency", "linear_efficiency", "pair_bandwidth", "in_node_latency"} <= measured
    assert cluster.attention_efficiency == pytest.approx(report["cluster"]["attention_efficiency"])


def test_more_ranks_than_npus_are_refused(tmp_path: Path) -> None:
    words = ["calibrate", str(tmp_path / "mine.yaml"), "--device", "npu", *SMALL, "--nproc", "3"]
    [(code, messages)] = run_commands(words, [{"HOST_CANN_DEVICES": "2"}])
    assert code == 2 and "error: --nproc 3: this machine has 2 NPUs; every rank needs its own" in messages
    assert not (tmp_path / "mine.yaml").exists()
