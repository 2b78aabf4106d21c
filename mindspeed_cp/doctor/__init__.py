"""`mindspeed-cp doctor` and `mindspeed-cp calibrate`: check and measure a machine, or all ranks that torchrun started.

one machine    run_checks    machine.py            versions, devices
                             operator.py           the operator against fp64, in a process that may hang
                                                   or crash (guarded.py)
                             kernel_capability.py  the rows that make the profile of an NPU
all ranks      ranks.py      the same on every rank, links, and algorithms;
                             findings.py says what the figures mean
a preset       calibrate.py  kernel_timing.py and links.py, fitted by mindspeed_cp/cluster
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from mindspeed_cp.device.select import load_npu, npu_identity
from mindspeed_cp.device.versions import version_report
from mindspeed_cp.doctor.findings import machine_findings, report_tables
from mindspeed_cp.doctor.guarded import Failure, GuardedCall, run_guarded
from mindspeed_cp.doctor.kernel_capability import capability_calls, make_profile, profile_row
from mindspeed_cp.doctor.machine import (
    DEVICES,
    backend_status,
    device_status,
    machine_status,
    rank_device,
    requirements,
    versions,
)
from mindspeed_cp.doctor.operator import (
    LONG_CASES,
    MAX_DIFFERENCE,
    SHORT_CASES,
    OperatorCase,
    applies,
    check,
    failed_check,
)
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.text import print_tables

__all__ = ["LONG_CASES", "SHORT_CASES", "run_checks", "write_report"]


def run_checks(kind: str = "auto", local_rank: int | None = None) -> dict[str, Any]:
    """Inspect the machine and check the operators of its devices.

    Args:
        kind: "cpu", "cuda" or "npu": only this device, which must be present; "auto": every device that is present.
        local_rank: number of a rank's device, which is checked by fewer cases and without a profile; None: no rank.

    Returns:
        {"ok", "requirements", "versions", "version_status", "machine", "devices", "backends", "checks",
        "npu_profile"}, plain data. "npu_profile" is the content of an NpuProfile, None without an NPU. "ok" is True if
        at least one backend runs, no check and no row of the profile exceeds its limit, and no version is too old.

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
    checks: list[dict[str, Any]] = []
    profile: dict[str, Any] | None = None
    for name in checked:
        calls = capability_calls() if name == "npu" and local_rank is None else []
        long_cases = LONG_CASES if local_rank is None else LONG_CASES[:2]
        cases = (*SHORT_CASES, *(long_cases if name != "cpu" else ()))
        rows, results = check_operator(name, cases, local_rank or 0, [call for *_, call in calls])
        checks += rows
        if calls:
            measured = zip(calls, results, strict=True)
            profile_rows = [profile_row(case, dtype, result) for (case, dtype, _), result in measured]
            profile = make_profile(profile_rows, npu_identity()).model_dump()
    statuses = version_report()
    refused = [status for status in statuses if status.status == "refused"]
    all_rows = [*checks, *(profile or {"rows": []})["rows"], *requirement_rows]
    return {
        "ok": bool(checks) and not refused and all(row["ok"] for row in all_rows),
        "requirements": requirement_rows,
        "versions": versions(statuses, bool(requirement_rows)),
        "version_status": [asdict(status) for status in statuses],
        "machine": machine_status(),
        "devices": devices,
        "backends": backends,
        "checks": checks,
        "npu_profile": profile,
    }


def check_operator(
    kind: str, cases: Sequence[OperatorCase], local_rank: int = 0, calls: Sequence[GuardedCall] = ()
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Check the operator of a device in every type.

    On NPUs and GPUs the calls are made in a process of their own: one that raises, hangs or crashes is a failed row.

    Args:
        kind: "cpu", "npu" or "cuda".
        cases: cases of the operator; those that the device does not have are left out.
        local_rank: number of the device.
        calls: further calls for that process.

    Returns:
        The rows of :func:`mindspeed_cp.doctor.operator.check`, and what the further calls return.
    """
    typed = [
        (dtype, case)
        for case in cases
        for dtype in MAX_DIFFERENCE  # one reference serves all
        if (dtype != "fp16" or case.plan is None) and applies(kind, dtype, case)  # plans do not depend on the type
    ]
    if kind == "cpu":
        return [check(kind, dtype, case) for dtype, case in typed], []
    guarded = [GuardedCall(check, (kind, dtype, case), case.name) for dtype, case in typed]
    results = run_guarded([*guarded, *calls], partial(rank_device, kind, local_rank))
    checks = [
        failed_check(kind, dtype, case, result.error) if isinstance(result, Failure) else result
        for (dtype, case), result in zip(typed, results, strict=False)
    ]
    return checks, results[len(typed) :]


def write_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Print a report of `run_checks`, as tables or as JSON."""
    if as_json:
        print(json.dumps(report))
        return
    print_tables(report_tables(report))
    for level, text in machine_findings(report):
        print(f"{level}: {text}")
