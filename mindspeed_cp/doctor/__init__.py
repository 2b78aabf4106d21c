"""`mindspeed-cp doctor`: lists versions and devices of this machine, and checks its attention operators.

The numeric check runs the operator forward and backward on packed batches of irregular lengths and compares the results
with dense attention in fp64.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from mindspeed_cp.device.select import load_npu
from mindspeed_cp.device.versions import version_report
from mindspeed_cp.doctor.cuda_kernels import kernel_table
from mindspeed_cp.doctor.exposure import exposure
from mindspeed_cp.doctor.fused import check_fused_operators
from mindspeed_cp.doctor.habit_cases import HABIT_CASES, HabitCase
from mindspeed_cp.doctor.links import check_links
from mindspeed_cp.doctor.machine import DEVICES, backend_status, device_status, machine_status, requirements, versions
from mindspeed_cp.doctor.npu_rows import check_npu
from mindspeed_cp.doctor.operator import LONG_CASES, MAX_DIFFERENCE, SHORT_CASES, applies, check
from mindspeed_cp.doctor.tables import report_tables
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.text import print_tables

__all__ = ["LONG_CASES", "MAX_DIFFERENCE", "SHORT_CASES", "run_checks", "write_report"]

LINK_MEGABYTES = 64


def run_checks(
    kind: str = "auto",
    seed: int = 0,
    link_megabytes: int = LINK_MEGABYTES,
    link_seconds: float | None = None,
    row_seconds: float | None = None,
    habits: Sequence[HabitCase] = HABIT_CASES,
) -> dict[str, Any]:
    """Inspect the machine and check the operators of its devices.

    Args:
        kind: "cpu", "cuda" or "npu": only this device, which must be present; "auto": every device that is present.
        seed: seed of the random inputs.
        link_megabytes: size of a message between NPUs in the speed measurement.
        link_seconds: time limit for the links; None: depends on the number of NPUs.
        row_seconds: time limit for a check of an NPU; None: ROW_SECONDS.
        habits: rows of the profile of an NPU.

    Returns:
        {"ok", "requirements", "versions", "version_status", "machine", "devices", "backends", "communication",
        "network", "kernels", "checks", "npu_profile", "fused_operators", "links"}, plain data. "npu_profile" is the
        content of an NpuProfile, None without an NPU. "ok" is True if at least one backend runs, no check and no row of
        the profile exceeds its limit, all links work and no version is too old.

    Raises:
        ConfigError: the requested device cannot be used; names the cause and the remedy.
    """
    if kind == "npu":
        load_npu("--device npu", "--device cpu")
    devices = {name: device_status(name) for name in DEVICES}
    if kind == "cuda" and not devices["cuda"]["count"]:
        raise ConfigError(f"--device cuda: {devices['cuda']['why']}; install torch for CUDA, or --device cpu")
    backends = {name: backend_status(name, devices[name]) for name in DEVICES}
    if kind == "cuda" and not backends["cuda"]["available"]:
        raise ConfigError(f"--device cuda: {backends['cuda']['why']}")
    checked = [name for name in DEVICES if backends[name]["available"] and kind in ("auto", name)]
    requirement_rows = requirements() if "npu" in checked else []
    if not all(row["ok"] for row in requirement_rows):  # the checks take minutes, and every operator call would fail
        checked.remove("npu")
    cases = {
        name: [
            (dtype, case)
            for case in (*SHORT_CASES, *(LONG_CASES if name != "cpu" else ()))
            for dtype in MAX_DIFFERENCE  # one reference serves all
            if (dtype != "fp16" or case.plan is None) and applies(name, dtype, case)  # plans do not depend on the type
        ]
        for name in checked
    }
    checks, profile = check_npu(cases.pop("npu"), seed, row_seconds, habits) if "npu" in checked else ([], None)
    checks += [check(name, dtype, case, seed) for name in cases for dtype, case in cases[name]]
    profile_rows = [] if profile is None else profile.model_dump()["rows"]
    fused = check_fused_operators(seed) if "npu" in checked else []
    links = check_links(devices["npu"]["count"], link_megabytes, link_seconds) if "npu" in checked else []
    statuses = version_report()
    refused = [status for status in statuses if status.status == "refused"]
    rows = (*checks, *profile_rows, *fused, *links, *requirement_rows)
    return {
        "ok": bool(checks) and not refused and all(row["ok"] for row in rows),
        "requirements": requirement_rows,
        "versions": versions(statuses, bool(requirement_rows)),
        "version_status": [asdict(status) for status in statuses],
        "machine": machine_status(),
        "devices": devices,
        "backends": backends,
        "communication": {
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
            "hccl": devices["npu"]["count"] > 0,
        },
        "network": exposure(),
        "kernels": kernel_table() if "cuda" in checked else [],
        "checks": checks,
        "npu_profile": None if profile is None else profile.model_dump(),
        "fused_operators": fused,
        "links": links,
    }


def write_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Print a report of `run_checks`, as tables or as JSON."""
    if as_json:
        print(json.dumps(report))
        return
    print_tables(report_tables(report))
    for row in report["requirements"]:
        if not row["ok"]:
            print(f"FAILED: {row['error']}; nothing was run on the NPUs")
        elif "note" in row:
            print(f"note: {row['note']}")
    for row in report["version_status"]:
        if row["status"] == "refused":
            print(f"FAILED: {row['package']} is {row['version']}: {row['reason']}")
    if report["network"]["note"]:
        print(f"note: {report['network']['note']}")
    failed = sum(not check["ok"] for check in report["checks"])
    total = len(report["checks"])
    profile = report.get("npu_profile") or {"rows": []}
    failed_links = [row["case"] for row in report["links"] if not row["ok"]]
    if report["ok"]:
        links = f"; all {len(report['links'])} rings of this machine's NPUs work" if report["links"] else ""
        rows = f"; so do all {len(profile['rows'])} rows of the npu backend's variants" if profile["rows"] else ""
        print(f"ok: all {total} checks of the attention operator agree with the fp64 reference{rows}{links}")
    elif failed:
        print(f"FAILED: {failed} of {total} checks of the attention operator differ from the fp64 reference")
    elif not total and all(row["ok"] for row in report["requirements"]):
        print("FAILED: no backend of the attention operator runs here")
    failed_rows = list(dict.fromkeys(row["name"] for row in profile["rows"] if not row["ok"]))
    if failed_rows:
        names = ", ".join(failed_rows[:6]) + f" and {len(failed_rows) - 6} more" * (len(failed_rows) > 6)
        print(f"FAILED: {names}; train with the npu_profile of this device, which takes what passed (--npu-profile)")
    failed_fused = [f"{row['operator']} ({row['dtype']})" for row in report.get("fused_operators", ()) if not row["ok"]]
    if failed_fused:
        print(f"FAILED: {', '.join(failed_fused)}; train with train.fused_operators: false")
    if failed_links:
        print(f"FAILED: {', '.join(failed_links)}")
