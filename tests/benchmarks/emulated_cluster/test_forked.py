"""Ranks that are forks of this process, in namespaces of their own."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster.fabric import ClusterError, cluster, missing
from benchmarks.cluster.forked import enter, fork_ranks
from benchmarks.cluster.network import Shape
from tests.limits import HANG

SMALL = Shape(2, 1, 1, 50_000_000)
LACK = missing()
needs_cluster = pytest.mark.skipif(LACK is not None, reason=str(LACK))


@needs_cluster
def test_each_rank_is_in_its_own_namespace(tmp_path: Path) -> None:
    def show_links(rank: int) -> None:
        print(rank, os.environ["GLOO_SOCKET_IFNAME"], os.readlink("/proc/self/ns/net"))
        print(*(line.split(":")[0].strip() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]))

    own = os.readlink("/proc/self/ns/net")
    with cluster(SMALL) as names:
        fork_ranks(names, SMALL, show_links, tmp_path)
    (first, first_links), (second, second_links) = (
        (tmp_path / f"rank{rank}.log").read_text().splitlines() for rank in range(2)
    )
    assert first.startswith("0 nic net:") and second.startswith("1 nic net:")
    assert len({first.split()[2], second.split()[2], own}) == 3 and os.readlink("/proc/self/ns/net") == own
    assert "nic" in first_links.split() and "nic" in second_links.split()


@needs_cluster
def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    def fail(rank: int) -> None:
        (tmp_path / f"{rank}.pid").write_text(str(os.getpid()))
        if rank == 1:
            sys.exit("no luck")
        time.sleep(HANG)

    with cluster(SMALL) as names, pytest.raises(ClusterError, match="rank 1 failed: SystemExit: no luck"):
        fork_ranks(names, SMALL, fail, tmp_path)
    for path in tmp_path.glob("*.pid"):
        assert not Path("/proc", path.read_text()).exists()


def test_a_namespace_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError):
        enter("mindspeed-cp-none")
