"""Versions, devices and backends of this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mindspeed_cp
from mindspeed_cp.device import open_files
from mindspeed_cp.device.select import cann_problem, cann_version, load_npu, unknown_cann_note
from mindspeed_cp.device.versions import Status
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention import BACKENDS

PACKAGES = (
    "torch",
    "torch-npu",
    "megatron-core",
    "transformer-engine",
    "numpy",
    "pydantic",
    "triton",
    "triton-ascend",
    "flash-attn-3",
)
DEVICES = ("npu", "cuda", "cpu")

#: File with the version of the Ascend driver.
DRIVER = Path("/usr/local/Ascend/driver/version.info")


def versions(statuses: Iterable[Status], npu: bool) -> dict[str, str | None]:
    """Return versions of this package, Python and related packages, and, with an NPU, of its driver and libraries.

    Args:
        statuses: result of version_report, which knows versions of source trees, too.
        npu: True with an NPU.
    """
    versions: dict[str, str | None] = {"mindspeed-cp": mindspeed_cp.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    versions |= {status.package: status.version for status in statuses}
    return {**versions, **(npu_versions() if npu else {})}


def npu_versions(driver: Path = DRIVER) -> dict[str, str | None]:
    """Return the versions of driver, CANN and HCCL from the driver's file and torch_npu; None if unknown."""
    versions: dict[str, str | None] = {"Ascend driver": None}
    if driver.exists():
        lines = dict(line.split("=", 1) for line in driver.read_text().splitlines() if "=" in line)
        versions["Ascend driver"] = lines.get("Version")
    return {**versions, **{name: cann_version(name) for name in ("CANN", "HCCL")}}


def requirements() -> list[dict[str, Any]]:
    """Return {"what", "ok", "error"} for each version that an NPU needs, with a "note" if it is unknown. The version of
    torch-npu is checked when it is loaded."""
    version = cann_version()
    error, note = cann_problem(version), unknown_cann_note(version)
    row = {"what": "CANN", "ok": error is None, "error": error}
    return [row if note is None else {**row, "note": note}]


def machine_status() -> dict[str, Any]:
    """Return system, cores, threads, and the files that a process may open (None: no limit)."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "open_files": open_files.hard_limit(),
    }


def device_status(kind: str) -> dict[str, Any]:
    """Return {"count", "names", "why"}: the devices of a kind, or why there is none."""
    if kind == "cpu":
        return {"count": 1, "names": [platform.processor() or platform.machine()], "why": None}
    if kind == "npu":
        try:
            load_npu("npu", "--device cpu")
        except ConfigError as error:
            return {"count": 0, "names": [], "why": str(error).removeprefix("npu: ")}
    module = getattr(torch, kind)
    if not module.is_available():
        why = (
            "torch was built without CUDA" if kind == "cuda" and torch.version.cuda is None else "no device is visible"
        )
        return {"count": 0, "names": [], "why": why}
    count = module.device_count()
    return {"count": count, "names": [module.get_device_name(i) for i in range(count)], "why": None}


def backend_status(kind: str, devices: dict[str, Any]) -> dict[str, Any]:
    """Return {"available", "why"}: whether the attention operator runs on a kind of device, or why not."""
    if kind not in BACKENDS:
        return {"available": False, "why": "this version has no attention operator for it"}
    if devices["count"] and kind == "cuda":
        try:
            for i in range(devices["count"]):
                BACKENDS[kind].check_device(torch.device(kind, i))
        except ConfigError as error:
            return {"available": False, "why": str(error)}
    return {"available": devices["count"] > 0, "why": devices["why"]}
