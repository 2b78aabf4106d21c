"""What is made on this machine, and that it goes away; the last tests need root and iproute2."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster import fabric
from benchmarks.cluster.fabric import ClusterError, cluster, missing, run_ranks
from benchmarks.cluster.network import Shape
from benchmarks.cluster.scale import VARIANTS
from tests.limits import HANG

SMALL = Shape(2, 1, 1, 50_000_000)
LACK = missing()
needs_cluster = pytest.mark.skipif(LACK is not None, reason=str(LACK))


def namespaces(process: int) -> set[str]:
    """The namespaces that a process has made and not removed."""
    folder, own = Path("/run/netns"), f"{fabric.PREFIX}{process}-"
    return {path.name for path in folder.iterdir() if path.name.startswith(own)} if folder.is_dir() else set()


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"needs root.*missing"), cluster(SMALL):
        pass


def test_only_what_is_its_own_and_over_is_left_over(monkeypatch):
    alive = subprocess.Popen(["sleep", str(HANG)])
    try:
        gone = subprocess.Popen(["true"])
        gone.wait()
        prefix = fabric.PREFIX
        listed = [f"{prefix}{gone.pid}-rank0 (id: 3)", f"{prefix}{alive.pid}-rank0", f"{prefix}x-rank0", "cpnode0", ""]
        done = subprocess.CompletedProcess([], 0, stdout="\n".join(listed))
        monkeypatch.setattr(fabric.subprocess, "run", lambda *a, **k: done)
        assert fabric.leftovers() == [f"{prefix}{gone.pid}-rank0"]
    finally:
        alive.kill()
        alive.wait()


@needs_cluster
def test_a_command_of_many_that_fails_is_an_error():
    with pytest.raises(ClusterError, match="-batch"):
        fabric.run_all([["ip", "link", "show", "mindspeed-none"]])


@needs_cluster
def test_everything_is_removed_at_the_end_and_on_failure():
    with cluster(SMALL) as names:
        assert namespaces(os.getpid()) == set(names.all(SMALL))
    assert namespaces(os.getpid()) == set()
    with pytest.raises(RuntimeError, match="on purpose"), cluster(SMALL):
        raise RuntimeError("on purpose")
    assert namespaces(os.getpid()) == set()


@needs_cluster
def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path):
    code = f"import sys, time; sys.exit('no luck') if sys.argv[1] == '1' else time.sleep({HANG})"
    with cluster(SMALL) as names, pytest.raises(ClusterError, match="rank 1 failed: no luck"):
        run_ranks(names, SMALL, lambda rank: [sys.executable, "-c", code, str(rank)], tmp_path)


SEND = """
import socket, sys
rank, address = sys.argv[1:]
if rank == "1":
    with socket.create_server((address, 4000)) as server:
        connection, _ = server.accept()
        assert sum(iter(lambda: len(connection.recv(65536)), 0)) == 1_000_000
else:
    while True:
        try:
            connection = socket.create_connection((address, 4000))
            break
        except ConnectionRefusedError:
            pass
    connection.sendall(bytes(1_000_000))
"""


@needs_cluster
def test_a_nic_holds_back_what_exceeds_its_rate(tmp_path):
    """By the kernel's counters: the rate of the class, the bytes that passed, and how often it held packets back."""
    slow = Shape(2, 1, 1, 5_000_000)
    with cluster(slow) as names:
        run_ranks(names, slow, lambda rank: [sys.executable, "-c", SEND, str(rank), slow.address(1)], tmp_path)
        command = ["tc", "-n", names.fabric, "-s", "class", "show", "dev", "up0"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (whole,) = (text for text in shown.split("class htb ") if text.startswith("1:1 "))
    assert " rate 5Mbit ceil 5Mbit " in whole
    assert int(re.findall(r"Sent (\d+) bytes", whole)[0]) >= 1_000_000
    assert sum(map(int, re.findall(r"overlimits (\d+)", shown))) > 0


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_ctrl_c_removes_everything(number):
    command = [sys.executable, "-m", "benchmarks.cluster", "--ranks-per-node", "1"]
    process = subprocess.Popen(
        [*command, "--sets", "one", "--repeat", "1000"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        own = f"{fabric.PREFIX}{process.pid}-rank1"
        while own not in namespaces(process.pid) and process.poll() is None:
            time.sleep(0.05)
        assert own in namespaces(process.pid)
        process.send_signal(number)
        out, _ = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert "stopped; everything it made is removed" in out
    assert namespaces(process.pid) == set()


@needs_cluster
@pytest.mark.thorough
def test_the_smallest_cluster_sends_what_its_plans_say(tmp_path):
    """Two nodes of one rank: every algorithm is timed, and the program proves the bytes of its plans."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.cluster", "--ranks-per-node", "1", "--rates", "20", "--tokens", "512"]
    more = ["--sets", "one", "--repeat", "1", "--heads", "4", "--kv-heads", "4", "--json", str(out)]
    process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    printed, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0, printed
    cases = json.loads(out.read_text())["cases"]
    assert [case["variant"] for case in cases] == list(VARIANTS)
    assert all(case["measured"] > 0 and case["predicted"] > 0 for case in cases)
    assert namespaces(process.pid) == set()
