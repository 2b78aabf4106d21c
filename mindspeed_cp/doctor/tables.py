"""Tables of the report of `doctor` on one machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from mindspeed_cp.device.npu_profile import NpuProfile, ProfileRow
from mindspeed_cp.device.open_files import largest_run
from mindspeed_cp.doctor.operator import DTYPES
from mindspeed_cp.report.text import Table


def report_tables(report: dict[str, Any]) -> list[Table]:
    """Return the tables of one machine: versions, devices, checks of the operator, variants of the npu backend."""
    devices = [
        (
            kind,
            str(device["count"]),
            ", ".join(sorted(set(device["names"]))) or device["why"],
            _operator(report["backends"][kind], device["why"]),
        )
        for kind, device in report["devices"].items()
    ]
    tables = [
        Table("Versions", ("", ""), tuple(_version_rows(report))),
        Table("Devices", ("device", "number", "name", "attention operator"), tuple(devices)),
    ]
    if report["checks"]:
        title = "Attention operator: largest difference of out, lse, dq, dk and dv to fp64, relative"
        tables.append(_by_type(title, ("device", "check"), [_check_cells(row) for row in report["checks"]]))
    if report["npu_profile"]:
        profile = NpuProfile(**report["npu_profile"])
        title = "Variants of the npu backend, largest difference to fp64"
        tables.append(_by_type(title, ("variant", "shape"), [_profile_cells(row) for row in profile.rows]))
    return tables


def _by_type(title: str, columns: Sequence[str], cells: Iterable[tuple[tuple[str, ...], str, str]]) -> Table:
    """Return a table with a row for each name and a column for each type, given (name, type, cell)."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for name, dtype, cell in cells:
        rows.setdefault(name, {})[dtype] = cell
    texts = ((*name, *(by_type.get(dtype, "-") for dtype in DTYPES)) for name, by_type in rows.items())
    return Table(title, (*columns, *DTYPES), tuple(texts))


def _check_cells(row: dict[str, Any]) -> tuple[tuple[str, ...], str, str]:
    worst = max(row["differences"].items(), key=lambda item: item[1], default=("", 0.0))
    return (row["backend"], row["case"]), row["dtype"], _cell(row, worst) + f" {row.get('kernel', '')}".rstrip()


def _profile_cells(row: ProfileRow) -> tuple[tuple[str, ...], str, str]:
    sizes = {name: math.inf if size is None else size for name, size in row.differences.items()}
    worst = max(sizes.items(), key=lambda item: item[1], default=("", 0.0))
    return (f"npu_{row.option}: {row.variant}", row.name), row.dtype, _cell({"ok": row.ok, "error": row.error}, worst)


def _cell(row: dict[str, Any], worst: tuple[str, float]) -> str:
    """Return the largest difference, and of a row that failed its name or the error."""
    if row["ok"]:
        return f"{worst[1]:.1e}"
    return f"FAILED {row['error'] or f'{worst[0]} {worst[1]:.1e}'}"


def _version_rows(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    machine = report["machine"]
    status_of = {row["package"]: row for row in report["version_status"]}
    for name, version in report["versions"].items():
        yield name, _version(version, status_of.get(name))
    cores, threads = _count(machine["cores"], "core"), _count(machine["threads"], "thread")
    yield "machine", f"{machine['system']}, {cores}, {threads}"
    yield "open files", _open_files(machine["open_files"])
    for row in report["requirements"]:
        yield f"{row['what']}, needed", _needed(row)
    yield "communication", ", ".join(name for name, is_there in report["communication"].items() if is_there) or "none"


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
        return f"yes: {backend['note']}" if backend.get("note") else "yes"
    return "no" if backend["why"] == device_reason else f"no: {backend['why']}"


def _needed(row: dict[str, Any]) -> str:
    if not row["ok"]:
        return f"FAILED {row['error']}"
    return f"not compared: {row['note']}" if "note" in row else "ok"
