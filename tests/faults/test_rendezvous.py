"""Many nodes: what listens for the ranks to meet, and on which address."""

from __future__ import annotations

import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed_cp.device.network import interface_addresses
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.train.local_agent import STORE_VARIABLE
from mindspeed_cp.train.nodes import Nodes, listening_socket
from mindspeed_cp.train.rendezvous import open_store
from tests.faults.test_launcher import wait_until
from tests.limits import HANG
from tests.ports import free_port
from tests.train.test_launch import COMMAND, ROOT, write
from tests.train.test_training import tiny

SECONDS = timedelta(seconds=HANG)


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    connections = process.net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.fault(
    fault="a stranger looks for the store of a run over many nodes",
    happens="it listens on the address of --master-addr alone; no rank unpickles what it holds",
    lost="nothing, if that address is in a private network",
    printed="nothing",
)
@pytest.mark.parametrize(("address", "other"), [("127.0.0.1", "127.0.0.7"), ("127.0.0.7", "127.0.0.1")])
def test_the_store_of_many_nodes_listens_on_the_given_address_alone(address: str, other: str) -> None:
    """A process for each of two nodes, on two addresses of one machine."""
    port = int(free_port())
    environment = {"MASTER_ADDR": address, "MASTER_PORT": str(port), STORE_VARIABLE: "/nowhere/store"}
    with ThreadPoolExecutor(1) as threads:
        before = listening(psutil.Process())
        second = threads.submit(open_store, environment, 1, 2, 1, SECONDS)
        store = open_store(environment, 0, 2, 1, SECONDS)
        assert listening(psutil.Process()) - before == {(address, port)}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=HANG)
        store.set("from rank 0", "here")
        assert second.result().get("from rank 0") == b"here"


def test_ranks_of_one_machine_meet_in_a_file(tmp_path: Path) -> None:
    before = listening(psutil.Process())
    store = open_store({STORE_VARIABLE: str(tmp_path / "store")}, 0, 1, 1, SECONDS)
    store.set("key", "value")
    assert (tmp_path / "store").exists() and listening(psutil.Process()) == before


@pytest.mark.thorough  # tests/launch_scripts trains on two nodes too; the test above says what listens
def test_two_nodes_train_and_only_their_address_listens(corpus: Path, tmp_path: Path) -> None:
    """Two launchers, as on two machines; a signal to one of them stops both in order."""
    folder, port = tmp_path / "run", free_port()
    size = {"context_parallel_suite__context_parallel_size": 2, "context_parallel_suite__nodes": 2}
    settings = write(tiny(corpus, folder, train__train_iters=100000, **size), tmp_path)
    where = ["--nproc=1", "--nodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    where.append(f"--log-dir={tmp_path}/logs")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    launchers = [
        subprocess.Popen([*COMMAND, str(settings), *where, f"--node-rank={node}"], cwd=ROOT, env=environment)
        for node in (0, 1)
    ]
    try:
        metrics = folder / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "step 2")
        family = [psutil.Process(launcher.pid) for launcher in launchers]
        assert all(listening(launcher) == set() for launcher in family)
        ranks = [child for launcher in family for child in launcher.children() if "python" in child.name()]
        assert len(ranks) == 2
        sockets = set().union(*map(listening, ranks))
        assert {address for address, _ in sockets} == {"127.0.0.1"} and ("127.0.0.1", int(port)) in sockets
        launchers[1].terminate()
        assert [launcher.wait(HANG) for launcher in launchers] == [0, 0]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert set(logs) == {"rank0.log", "rank1.log"} and "stopped by a signal to another rank" in logs["rank0.log"]


@pytest.mark.fault(
    fault="a node starts its ranks again (`train.max_restarts`) while rank 0 still ends the start before",
    happens="they wait for the next start of rank 0, and the ranks of different starts never meet",
    lost="nothing more",
    printed="nothing",
)
def test_ranks_of_different_starts_do_not_meet() -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ThreadPoolExecutor(2) as threads:
        peer = threads.submit(open_store, environment, 1, 2, 1, SECONDS)
        store = open_store(environment, 0, 2, 1, SECONDS)
        store.set("from the first start", "here")
        assert peer.result().get("from the first start") == b"here"
        early = threads.submit(open_store, environment, 1, 2, 1, SECONDS)
        with pytest.raises(PeerError, match=r"rank 1 waited 1 s at .*, and rank 0 trains, or ends, with all ranks"):
            open_store(environment, 1, 2, 1, timedelta(seconds=1))
        assert not early.done()
        del store  # and with it the first start
        store = open_store(environment, 0, 2, 1, SECONDS)
        store.set("from the second start", "here")
        assert early.result().get("from the second start") == b"here"
        assert not early.result().check(["from the first start"])


def test_a_rank_that_ended_while_others_were_missing_may_come_again() -> None:
    """As after a node's launcher was stopped and started by hand."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(open_store, environment, 0, 3, 1, SECONDS)
        for _ in range(2):
            with pytest.raises(PeerError, match=r"rank 1 waited 1 s at .*, and not all ranks came"):
                open_store(environment, 1, 3, 1, timedelta(seconds=1))
        again = [threads.submit(open_store, environment, rank, 3, 1, SECONDS) for rank in (1, 2)]
        first.result().set("from rank 0", "here")
        assert [rank.result().get("from rank 0") for rank in again] == [b"here"] * 2


def test_rank_0_names_the_number_of_ranks_that_came() -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with pytest.raises(PeerError, match=r"rank 0 waited 1 s at .*, and 1 of 2 ranks came"):
        open_store(environment, 0, 2, 1, timedelta(seconds=1))


# names, addresses, ports


def resolving(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of this machine is known to it as `to`."""
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *rest, **more: real(to if name == "node0" else name, *rest, **more)
    )


def test_a_name_that_is_loop_back_here_takes_the_address_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian writes 127.0.1.1 for a machine's own name."""
    resolving("127.0.1.1", monkeypatch)
    port = int(free_port())
    with listening_socket("node0", port, "lo") as listener:
        assert listener.getsockname()[0] == interface_addresses()["lo"][0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = node0: is 127.0.1.1 on this machine.*GLOO_SOCKET_IFNAME"):
        listening_socket("node0", port)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("192.0.2.1", "MASTER_ADDR = 192.0.2.1, MASTER_PORT = {port}: rank 0 cannot listen there (Cannot assign"),
        ("0.0.0.0", "MASTER_ADDR = 0.0.0.0: means every address of this machine; give the one"),
        ("::", "MASTER_ADDR = ::: means every address of this machine"),
        ("no.such.name.invalid", "MASTER_ADDR = no.such.name.invalid: cannot be found"),
    ],
)
def test_an_address_of_another_machine_is_refused(name: str, says: str) -> None:
    port = int(free_port())
    with pytest.raises(ConfigError) as error:
        listening_socket(name, port)
    assert says.format(port=port) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.fault(
    fault="the port of --master-port is taken",
    happens="rank 0 refuses to start",
    lost="nothing",
    printed="MASTER_ADDR and MASTER_PORT, and what they must be",
)
def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"MASTER_PORT = {port}: rank 0 cannot listen there \(Address already"):
            listening_socket("127.0.0.1", port)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((0,), "--nodes 0: must be 1 or more"),
        ((2, 2, "a"), "--node-rank 2: must be 0 to 1; --nodes is 2"),
        ((2, 1), "--master-addr: needed for 2 nodes: the name or an address of node 0"),
        ((2, 1, "a", 80), "--master-port 80: must be 1024 to 65535"),
    ],
)
def test_nodes_that_cannot_be(values: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Nodes(*values)
    assert str(error.value) == says
