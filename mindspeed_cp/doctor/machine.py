"""What this machine has: versions, devices, backends."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mindspeed_cp
from mindspeed_cp.devices import cann_version, check_cann, load_npu, unknown_cann
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

#: Where drivers of Ascend devices leave their version.
DRIVER = Path("/usr/local/Ascend/driver/version.info")


def versions(npu: bool) -> dict[str, str | None]:
    """Of this package, Python, the packages that matter, and, where there is an NPU, its driver and libraries."""
    found: dict[str, str | None] = {"mindspeed-cp": mindspeed_cp.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {**found, **(npu_versions() if npu else {})}


def npu_versions(driver: Path = DRIVER) -> dict[str, str | None]:
    """Versions of driver, CANN and HCCL, as torch_npu and the driver's own file tell them; None where they do not."""
    found: dict[str, str | None] = {"Ascend driver": None}
    if driver.exists():
        lines = dict(line.split("=", 1) for line in driver.read_text().splitlines() if "=" in line)
        found["Ascend driver"] = lines.get("Version")
    return {**found, **{name: cann_version(name) for name in ("CANN", "HCCL")}}


def requirements() -> list[dict[str, Any]]:
    """{"what", "ok", "error"} for each version that an NPU needs, and "note" where it is not known; torch-npu's was
    looked at when it was loaded."""
    version = cann_version()
    wrong, unknown = check_cann(version), unknown_cann(version)
    row = {"what": "CANN", "ok": wrong is None, "error": wrong}
    return [row if unknown is None else {**row, "note": unknown}]


def machine() -> dict[str, Any]:
    """System, cores and threads."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def device(kind: str) -> dict[str, Any]:
    """{"count", "names", "why"}: how many devices of a kind there are, or why there is none."""
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


def backend(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """{"available", "why"}: whether the attention operator runs on a kind of device, or why not."""
    if kind not in BACKENDS:
        return {"available": False, "why": "this version has no attention operator for it"}
    if found["count"] and kind == "cuda":
        try:
            for i in range(found["count"]):
                BACKENDS[kind].check_device(torch.device(kind, i))
        except ConfigError as error:
            return {"available": False, "why": str(error)}
    return {"available": found["count"] > 0, "why": found["why"]}
