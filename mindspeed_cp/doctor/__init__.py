"""`mindspeed-cp doctor`: what this machine has, and whether its attention operator computes attention.

The numeric check runs the operator forward and backward on packed batches whose lengths divide by nothing and compares
with attention by its definition in fp64.  On a new device, driver or library this is a minute well spent.
"""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from mindspeed_cp.devices import load_npu
from mindspeed_cp.doctor.links import check_links
from mindspeed_cp.doctor.machine import DEVICES, backend, device, machine, requirements, versions
from mindspeed_cp.doctor.operator import CASES, LIMITS, LONG, applies, check
from mindspeed_cp.doctor.serving import kernels
from mindspeed_cp.doctor.tables import tables
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.console import print_tables

__all__ = ["CASES", "LIMITS", "LONG", "examine", "write_report"]

LINK_MEGABYTES = 64


def examine(
    kind: str = "auto", seed: int = 0, link_megabytes: int = LINK_MEGABYTES, link_seconds: float | None = None
) -> dict[str, Any]:
    """Look at the machine and check the operators of its devices.

    Args:
        kind: "cpu", "cuda" or "npu": this device only, and it must be there; "auto": every device that is there.
        seed: of the numbers.
        link_megabytes: of a message between NPUs when speed is measured.
        link_seconds: until the links are given up; None: by the number of NPUs.

    Returns:
        {"ok", "requirements", "versions", "machine", "devices", "backends", "communication", "kernels", "checks",
        "links"},
        all of it plain data; "ok" is True if at least one backend runs, no check is over its limit, all links are right
        and no version is too old.

    Raises:
        ConfigError: the device asked for cannot be used; names the cause and the remedy.
    """
    if kind == "npu":
        load_npu("--device npu", "--device cpu")
    devices = {name: device(name) for name in DEVICES}
    if kind == "cuda" and not devices["cuda"]["count"]:
        raise ConfigError(f"--device cuda: {devices['cuda']['why']}; install torch for CUDA, or --device cpu")
    backends = {name: backend(name, devices[name]) for name in DEVICES}
    if kind == "cuda" and not backends["cuda"]["available"]:
        raise ConfigError(f"--device cuda: {backends['cuda']['why']}")
    wanted = [name for name in DEVICES if backends[name]["available"] and kind in ("auto", name)]
    needed = requirements() if "npu" in wanted else []
    if not all(row["ok"] for row in needed):  # what would follow takes minutes, and its operators refuse to start
        wanted.remove("npu")
    checks = [
        check(name, dtype, case, seed)
        for name in wanted
        for dtype in LIMITS
        for case in (*CASES, *(LONG if name != "cpu" else ()))
        if (dtype != "fp16" or case.plan is None) and applies(name, dtype, case)  # plans do not depend on the type
    ]
    links = check_links(devices["npu"]["count"], link_megabytes, link_seconds) if "npu" in wanted else []
    return {
        "ok": bool(checks) and all(row["ok"] for row in (*checks, *links, *needed)),
        "requirements": needed,
        "versions": versions(bool(needed)),
        "machine": machine(),
        "devices": devices,
        "backends": backends,
        "communication": {
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
            "hccl": devices["npu"]["count"] > 0,
        },
        "kernels": kernels() if "cuda" in wanted else [],
        "checks": checks,
        "links": links,
    }


def write_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Print a report of `examine`, as tables or as JSON."""
    if as_json:
        print(json.dumps(report))
        return
    print_tables(tables(report))
    for row in report["requirements"]:
        if not row["ok"]:
            print(f"FAILED: {row['error']}; nothing was run on the NPUs")
        elif "note" in row:
            print(f"note: {row['note']}")
    failed = sum(not check["ok"] for check in report["checks"])
    total = len(report["checks"])
    cut = [row["case"] for row in report["links"] if not row["ok"]]
    if report["ok"]:
        links = f"; all {len(report['links'])} rings of this machine's NPUs turn" if report["links"] else ""
        print(f"ok: all {total} checks of the attention operator agree with the fp64 reference{links}")
    elif failed:
        print(f"FAILED: {failed} of {total} checks of the attention operator differ from the fp64 reference")
    elif not total and all(row["ok"] for row in report["requirements"]):
        print("FAILED: no backend of the attention operator runs here")
    if cut:
        print(f"FAILED: {', '.join(cut)}")
