"""`doctor` and `calibrate` on two NPUs over the stand-in: HCCL carries the messages, the operators of torch-npu compute.

Speeds are the stand-in's; what is tested is that NPUs are waited for, that links go over HCCL, and what is counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from mindspeed_cp.cluster import load_cluster
from tests.npu.commands import command
from tests.ports import free_port
from tests.programs import run_programs

PLACE = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HOST_CANN_DEVICES": "2"}
#: fp32, as a CPU without bf16 of its own takes minutes for one of the products.
SMALL = ("--seconds", "0.2", "--longest", "1024", "--heads", "4", "--head-dim", "64", "--dtype", "fp32")


def launched(ranks: int, started: Iterable[int]) -> list[dict[str, str]]:
    """Variables of the ranks that are started, of so many on a machine with two NPUs."""
    both = {**PLACE, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    both |= {"MASTER_PORT": str(free_port()), "HCCL_CONNECT_TIMEOUT": "120"}
    return [{**both, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in started]


@pytest.mark.thorough  # over a minute: the timed matrix products on one core
def test_the_doctor_of_two_npus_writes_a_report(tmp_path: Path) -> None:
    words = ["doctor", "--device", "npu", "--report", str(tmp_path / "report.json")]
    first, _ = run_programs(command, words, launched(2, range(2)))
    results = json.loads((tmp_path / "report.json").read_text())
    assert results["finished"] and len(results["links"]) == 1, first.stderr[-3000:]
    assert len(results["algorithms"]) == 7
    assert all(row["wrong"] is None for row in results["algorithms"])
    assert all(rank["device"] == results["ranks"][0]["device"] for rank in results["ranks"])
    assert results["ranks"][0]["environment"]["HCCL_CONNECT_TIMEOUT"] == "120"
    assert results["failures"] == [] and all(rank["ok"] for rank in results["ranks"]), first.stderr[-3000:]


@pytest.mark.thorough  # half a minute: a fit of shorter measurements fails by their noise
def test_two_npus_are_measured(tmp_path: Path) -> None:
    words = ["calibrate", str(tmp_path / "mine.yaml"), "--device", "npu", *SMALL, "--base", "a2", "--json"]
    done, other = run_programs(command, words, launched(2, range(2)))
    assert done.returncode == other.returncode == 0, done.stderr[-3000:]
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    cluster, base = load_cluster(tmp_path / "mine.yaml"), load_cluster("a2")
    assert cluster.ranks_per_node == 2 and cluster.peak_flops == base.peak_flops and cluster.memory == base.memory
    assert set(report["fits"]) == {"attention", "linear", "in_node"}
    measured = {key for key, source in report["sources"].items() if source == "measured"}
    assert {"launch", "attention_efficiency", "linear_efficiency", "pair_bandwidth", "in_node_latency"} <= measured
    assert cluster.attention_efficiency == pytest.approx(report["cluster"]["attention_efficiency"])


def test_more_ranks_than_npus_are_refused(tmp_path: Path) -> None:
    words = ["calibrate", str(tmp_path / "mine.yaml"), "--device", "npu", *SMALL]
    [done] = run_programs(command, words, launched(3, [2]))
    assert done.returncode == 2 and "error: --device npu: rank 2 of a machine with 2 of them" in done.stderr
    assert not (tmp_path / "mine.yaml").exists()
