"""What doctor says of the network."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import run as torchrun

from mindspeed_cp.device.network import interface_addresses, reach
from mindspeed_cp.doctor.exposure import exposure
from mindspeed_cp.doctor.tables import report_tables
from tests.faults.test_rendezvous import SECONDS, listening


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", "this machine"),
        ("::1", "this machine"),
        ("10.1.2.3", "private network"),
        ("192.168.0.9", "private network"),
        ("fe80::1%eth0", "private network"),
        ("8.8.8.8", "internet"),
        ("2001:4860:4860::8888", "internet"),
    ],
)
def test_who_reaches_an_address(address: str, expected: str) -> None:
    assert reach(address) == expected


def devices(monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:

    address = {name: [SimpleNamespace(family=socket.AF_INET, address=text)] for name, text in texts.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: address)


def test_an_address_in_the_internet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, lo="127.0.0.1", eth0="8.8.8.8")
    assert interface_addresses() == {"lo": ["127.0.0.1"], "eth0": ["8.8.8.8"]}
    note = exposure()["note"]
    assert note.startswith("eth0 (8.8.8.8) is reached from the internet") and "\n" not in note
    devices(monkeypatch, lo="127.0.0.1", eth0="10.0.0.1")
    assert exposure()["note"] is None


def test_the_tables_name_every_launcher_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, eth7="10.0.0.7")
    report: dict[str, Any] = {
        "machine": {"system": "", "cores": 1, "threads": 1, "open_files": None}, "network": exposure(), "communication": {},
        **{name: {} for name in ("versions", "devices", "backends")},
        **{name: [] for name in ("requirements", "checks", "kernels", "links")},
    }  # fmt: skip
    many, addresses = report_tables(report)[-2:]
    assert [row[0].split()[0] for row in many.rows] == ["mindspeed-cp", "torchrun", "torchrun"]
    assert addresses.rows == (("eth7", "10.0.0.7", "private network"),)


def test_the_store_of_torch_listens_on_every_interface() -> None:
    """What the table says of torchrun; a release that mends it fails here."""
    before = listening(psutil.Process())
    store = dist.TCPStore("127.0.0.1", 0, 1, True, SECONDS)
    ((address, port),) = listening(psutil.Process()) - before
    assert address in ("::", "0.0.0.0") and port == store.port


@pytest.mark.parametrize(
    ("words", "backend"),
    [("", "c10d"), ("--standalone", "c10d"), ("--master-port 29500", "static"), ("--nnodes 2", "static")],
)
def test_the_backends_that_torchrun_takes(words: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documentation gives --master-port for this."""
    taken: list[str] = []

    def elastic_launch(config: Any, entrypoint: Any) -> Any:
        taken.append(config.rdzv_backend)
        return lambda *_: None

    monkeypatch.setattr(torchrun, "elastic_launch", elastic_launch)
    monkeypatch.setattr(torchrun.torch.multiprocessing, "_set_thread_name", lambda name: None)
    torchrun.run(torchrun.parse_args([*words.split(), "example.py"]))
    assert taken == [backend]
