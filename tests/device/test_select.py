"""The device of a rank, and the one line for whatever keeps an NPU from being used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_cp.device import select as devices
from mindspeed_cp.doctor.machine import requirements
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train import world as device


@pytest.fixture
def npus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As if torch_npu were installed for this torch, with 8 NPUs."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: object() if name == "torch_npu" else real(name, *a)
    )
    made = SimpleNamespace(version="2.13.0", cann="9.0.0", count=8, current=None)

    def set_device(x: torch.device) -> None:
        made.current = x

    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")

    def version(name: str) -> str:
        if made.version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return made.version

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(device, "cann_version", lambda: made.cann)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    npu = SimpleNamespace(is_available=lambda: made.count > 0, device_count=lambda: made.count, set_device=set_device)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    return made


def test_the_cpu_needs_nothing() -> None:
    assert device.pick_device("cpu", 3, 4) == torch.device("cpu")


def test_auto_is_the_npu_where_torch_npu_is_installed(npus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.resolve_device_type("auto") == "npu"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "device", lambda *place: place)  # there is no NPU in this process
        assert device.pick_device("auto", 5, 8) == ("npu", 5) == npus.current
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    assert devices.resolve_device_type("auto") == "cpu"
    assert device.pick_device("auto", 5, 8) == torch.device("cpu")


def test_without_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    with pytest.raises(ConfigError, match=r"train.device = npu: torch_npu is not installed; pip install torch-npu==\d"):
        device.pick_device("npu", 0, 1)


def test_torch_npu_of_another_release(npus: SimpleNamespace) -> None:
    npus.version = "2.7.1.post2"
    with pytest.raises(ConfigError, match=r"torch_npu is 2.7.1.post2 and torch is 2.13.0\+cpu; .* torch-npu==2.13.0$"):
        device.pick_device("npu", 0, 1)
    npus.version = "2.13.0.post4"  # a repair of the same release
    assert devices.load_npu() is torch.npu  # type: ignore[attr-defined]


def test_torch_npu_without_its_metadata(npus: SimpleNamespace) -> None:
    """A source tree on PYTHONPATH: the package itself tells its version."""
    npus.version = None
    assert devices.load_npu() is torch.npu  # type: ignore[attr-defined]
    sys.modules["torch_npu"].__version__ = "2.12.0"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"torch_npu is 2.12.0 and torch is 2.13.0\+cpu"):
        device.pick_device("npu", 0, 1)


@pytest.mark.parametrize("version", ["8.5.0", "8.5.0.alpha003", "8.5.RC1", "9.0.0", "10.1.0"])
def test_cann_that_is_new_enough(version: str) -> None:
    assert devices.cann_problem(version) is None and devices.unknown_cann_note(version) is None


@pytest.mark.parametrize(
    ("version", "said"),
    [(None, "CANN: torch_npu finds no version, so"), ("unknown", "CANN: the version is 'unknown', so")],
)
def test_cann_that_is_not_known_stops_nothing_and_is_told(
    npus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    npus.cann = version
    with monkeypatch.context() as patch:
        patch.setattr(torch, "device", lambda *place: place)  # there is no NPU in this process
        assert device.pick_device("npu", 0, 1) == ("npu", 0)
    monkeypatch.setattr(sys.modules[requirements.__module__], "cann_version", lambda: version)
    [row] = requirements()
    assert row["ok"] and row["note"] == devices.unknown_cann_note(version)
    assert row["note"] == f"{said} it was not compared with 8.5, the oldest that is needed"


@pytest.mark.parametrize(
    ("seconds", "exec_", "connect"),
    [(600.0, "540", "540"), (77.5, "69", "120"), (9000.0, "8100", "7200"), (0.5, "1", "120")],
)
def test_hccl_gives_up_before_the_watchdog(
    seconds: float, exec_: str, connect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    devices.set_hccl_timeouts(seconds)
    assert os.environ == {"HCCL_EXEC_TIMEOUT": exec_, "HCCL_CONNECT_TIMEOUT": connect}
    devices.set_hccl_timeouts(1e6)  # what is set is kept
    assert os.environ["HCCL_EXEC_TIMEOUT"] == exec_


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("8.3.RC1", "CANN is 8.3.RC1, needed is 8.5 or later; install CANN 8.5 or later"),
        ("7.0.0", "CANN is 7.0.0, needed is 8.5 or later; install CANN 8.5 or later"),
    ],
)
def test_cann_that_is_too_old(npus: SimpleNamespace, version: str | None, said: str) -> None:
    npus.cann = version
    with pytest.raises(ConfigError) as caught:
        device.pick_device("npu", 0, 1)
    assert str(caught.value).startswith(f"train.device = npu: {said}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
            "libhccl.so, a library of CANN, is not found",
        ),
        (RuntimeError("driver and\nCANN do not match"), "driver and CANN do not match"),
    ],
)
def test_libraries_that_are_missing(
    npus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    class Fails:
        def find_spec(self, name: str, *args: Any) -> None:
            if name == "torch_npu":
                raise error

    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.setattr(sys, "meta_path", [Fails(), *sys.meta_path])
    with pytest.raises(ConfigError) as caught:
        device.pick_device("npu", 0, 1)
    assert f"torch_npu cannot be loaded ({said}); install CANN" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_npu(npus: SimpleNamespace) -> None:
    npus.count = 0
    with pytest.raises(ConfigError, match=r"train.device = npu: torch_npu finds no NPU; check `npu-smi info`"):
        device.pick_device("npu", 0, 1)


def test_more_ranks_than_npus(npus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"= npu: 9 ranks on this machine, which has 8 NPUs; start at most 8 ranks"):
        device.pick_device("npu", 0, 9)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    npus.count = 2
    with pytest.raises(ConfigError, match="which has 2 NPUs; ASCEND_RT_VISIBLE_DEVICES hides the others; start"):
        device.pick_device("npu", 0, 3)
