"""Tables of a report of `doctor`."""

from __future__ import annotations

from typing import Any

from mindspeed_cp.device.npu_profile import NpuProfile
from mindspeed_cp.device.open_files import largest_run
from mindspeed_cp.doctor.operator import RESULT_NAMES
from mindspeed_cp.doctor.profile_tables import profile_tables
from mindspeed_cp.report.text import Table


def report_tables(report: dict[str, Any]) -> list[Table]:
    """Return the tables: versions, devices, checks of the operator, variants of the npu backend, rings between NPUs,
    the network."""
    machine = report["machine"]
    known = {row["package"]: row for row in report.get("version_status", ())}
    versions = [(name, _version(version, known.get(name))) for name, version in report["versions"].items()]
    cores, threads = _count(machine["cores"], "core"), _count(machine["threads"], "thread")
    versions.append(("machine", f"{machine['system']}, {cores}, {threads}"))
    versions.append(("open files", _open_files(machine["open_files"])))
    versions += [(f"{row['what']}, needed", _needed(row)) for row in report["requirements"]]
    devices = [
        (
            kind,
            str(device["count"]),
            ", ".join(sorted(set(device["names"]))) or device["why"],
            _operator(report["backends"][kind], device["why"]),
        )
        for kind, device in report["devices"].items()
    ]
    checks = [
        (
            f"{check['backend']} {check['dtype']}: {check['case']}",
            *(f"{check['differences'][part]:.1e}" if part in check["differences"] else "-" for part in RESULT_NAMES),
            f"{check['limit']:.0e}",
            "ok" if check["ok"] else f"FAILED {check['error'] or ''}".strip(),
        )
        for check in report["checks"]
    ]
    links = ", ".join(name for name, available in report["communication"].items() if available) or "none"
    tables = [
        Table("Versions", ("", ""), (*versions, ("communication", links))),
        Table("Devices", ("device", "number", "name", "attention operator"), tuple(devices)),
        Table("Attention operator, difference to fp64", ("check", *RESULT_NAMES, "limit", ""), tuple(checks)),
    ]
    if report["kernels"]:
        rows = tuple(
            (", ".join(row["where"]) or "everything", row["dtype"], row["kernel"]) for row in report["kernels"]
        )
        tables.insert(2, Table("Kernels of the cuda backend", ("attention", "type", "served by"), rows))
    if report.get("npu_profile"):
        tables += profile_tables(NpuProfile(**report["npu_profile"]))
    if report.get("fused_operators"):
        fused = [
            (
                f"{row['operator']} {row['dtype']}".strip(),
                "-" if row["difference"] is None else f"{row['difference']:.1e}",
                "-" if row["limit"] is None else f"{row['limit']:.0e}",
                row["error"] or "ok" if row["ok"] else f"FAILED {row['error'] or ''}".strip(),
            )
            for row in report["fused_operators"]
        ]
        head = ("operator", "difference", "limit", "")
        tables.append(Table("Fused operators of torch-npu, largest difference to fp64", head, tuple(fused)))
    if report["links"]:
        rings = [
            (
                row["case"],
                "-" if row["gigabytes_per_second"] is None else f"{row['gigabytes_per_second']:.1f}",
                "ok" if row["ok"] else f"FAILED {row['error']}",
            )
            for row in report["links"]
        ]
        columns = ("HCCL between NPUs of this machine", "GB/s, slowest rank, each way", "")
        tables.append(Table("Links", columns, tuple(rings)))
    return [*tables, *_network(report["network"])]


def _network(network: dict[str, Any]) -> list[Table]:
    launchers = tuple((row["launcher"], row["listens"], row["stranger"]) for row in network["launchers"])
    addresses = tuple((row["device"], row["address"], row["reach"]) for row in network["addresses"])
    return [
        Table("Many nodes", ("started by", "listens", "who connects can"), launchers),
        Table("Addresses of this machine", ("network device", "address", "reached from"), addresses),
    ]


def _version(version: str | None, status: dict[str, Any] | None) -> str:
    if status is None or status["status"] == "missing":
        return version or "not installed"
    reason = f" ({status['reason']})" if status["reason"] else ""
    return f"{version}: {status['status']}{reason}"


def _open_files(limit: int | None) -> str:
    if limit is None:
        return "no limit"
    return f"{limit:,} for a process (ulimit -Hn), enough for a run of about {largest_run(limit):,} ranks"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _operator(backend: dict[str, Any], device_reason: str | None) -> str:
    """Return whether a backend is available; a reason that the table gives for the device is not repeated."""
    if backend["available"]:
        return "yes"
    return "no" if backend["why"] == device_reason else f"no: {backend['why']}"


def _needed(row: dict[str, Any]) -> str:
    if not row["ok"]:
        return f"FAILED {row['error']}"
    return f"not compared: {row['note']}" if "note" in row else "ok"
