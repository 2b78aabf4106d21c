"""mindspeed-cp calibrate --device npu over the stand-in: it runs on two NPUs and writes a preset that loads.

The speeds are the stand-in's; what is tested is that NPUs are waited for, that links go over HCCL, and what is counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_cp.cluster import load_cluster
from tests.npu.commands import run_commands
from tests.ports import free_port

#: fp32, as a CPU without bf16 of its own takes minutes for one of the products.
SMALL = ("--seconds", "0.2", "--longest", "1024", "--heads", "4", "--head-dim", "64", "--dtype", "fp32")


def calibrate(out: Path, ranks: int, started: list[int], *arguments: str) -> list[tuple[int | None, str]]:
    """Exit code and messages of the ranks that are started, of so many on a machine with two NPUs."""
    both = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    both |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "HOST_CANN_DEVICES": "2"}
    words = ["calibrate", str(out), "--device", "npu", *SMALL, *arguments]
    return run_commands(words, [{**both, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in started])


@pytest.mark.thorough  # half a minute: a fit of shorter measurements fails by their noise
def test_two_npus_are_measured(tmp_path: Path) -> None:
    for code, messages in calibrate(tmp_path / "mine.yaml", 2, [0, 1], "--base", "a2"):
        assert code == 0, messages[-3000:]
    cluster, base = load_cluster(tmp_path / "mine.yaml"), load_cluster("a2")
    assert cluster.ranks_per_node == 2 and cluster.peak_flops == base.peak_flops and cluster.memory == base.memory
    lines = (tmp_path / "mine.yaml").read_text().splitlines()
    measured = {line.split(":")[0] for line in lines if line.endswith("# measured")}
    assert {"launch", "attention_efficiency", "linear_efficiency", "pair_bandwidth", "in_node_latency"} <= measured


def test_more_ranks_than_npus_are_refused(tmp_path: Path) -> None:
    [(code, messages)] = calibrate(tmp_path / "mine.yaml", 3, [2])
    assert code == 2 and "error: --device npu: rank 2 of a machine with 2 of them" in messages
    assert not (tmp_path / "mine.yaml").exists()
