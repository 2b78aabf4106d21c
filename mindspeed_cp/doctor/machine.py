"""Versions, devices and backends of this machine, and the device of a rank."""

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
from mindspeed_cp.device.select import cann_problem, cann_version, load_cuda, load_npu, unknown_cann_note
from mindspeed_cp.device.versions import Status
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.backends import BACKENDS
from mindspeed_cp.ops.attention.cuda.flash4 import flash_4_unavailable_reason

PACKAGES = ("transformer-engine", "pydantic", "triton", "triton-ascend", "flash-attn-4")  # beside those with limits
DEVICES = ("npu", "cuda", "cpu")

#: Libraries of a process group for tensors of a device; numbers of the host travel over gloo.
GROUP_LIBRARIES = {"cpu": "gloo", "npu": "cpu:gloo,npu:hccl", "cuda": "cpu:gloo,cuda:nccl"}

#: File with the version of the Ascend driver.
DRIVER = Path("/usr/local/Ascend/driver/version.info")


def versions(statuses: Iterable[Status], npu: bool) -> dict[str, str | None]:
    """Return versions of this package, Python and related packages, and with an NPU of its driver and libraries; None
    where one is not there, or not known.

    Args:
        statuses: result of version_report.
        npu: True with an NPU.
    """
    versions: dict[str, str | None] = {"mindspeed-cp": mindspeed_cp.__version__}
    versions |= {status.package: status.version for status in statuses}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    if npu:
        lines = DRIVER.read_text().splitlines() if DRIVER.exists() else []
        versions["Ascend driver"] = dict(line.split("=", 1) for line in lines if "=" in line).get("Version")
        versions |= {name: cann_version(name) for name in ("CANN", "HCCL")}
    return versions


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
    """Return {"available", "why"}: whether the attention operator runs on a kind of device, or why not; of GPUs also
    "note": which version of FlashAttention is called."""
    if kind not in BACKENDS:
        return {"available": False, "why": "this version has no attention operator for it"}
    if devices["count"] and kind == "cuda":
        try:
            for i in range(devices["count"]):
                BACKENDS[kind].check_device(torch.device(kind, i))
        except ConfigError as error:
            return {"available": False, "why": str(error)}
        reason = flash_4_unavailable_reason()
        note = f"FlashAttention 2 of torch ({reason})" if reason else "FlashAttention 4, or 2 of torch"
        return {"available": True, "why": None, "note": note}
    return {"available": devices["count"] > 0, "why": devices["why"]}


def rank_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank, made the current one; a CPU serves all ranks.

    Raises:
        ConfigError: there is no such device.
    """
    if kind == "cpu":
        return torch.device("cpu")
    module = (load_npu if kind == "npu" else load_cuda)(f"--device {kind}", "--device cpu")
    if local_rank >= module.device_count():
        raise ConfigError(f"--device {kind}: rank {local_rank} of a machine with {module.device_count()} of them")
    module.set_device(local_rank)
    return torch.device(kind, local_rank)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what was launched; the CPU always has."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the name of a device."""
    if device.type == "cpu":
        return f"CPU ({platform.machine()})"
    return str(torch.get_device_module(device).get_device_name(device))


def device_memory(device: torch.device) -> int:
    """Return the bytes of a device's memory; of a CPU, those of the machine."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
