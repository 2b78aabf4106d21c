"""What the checks of a machine and those of all ranks say: sentences on what is slow, wrong or failed, and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median_high
from typing import Any

from mindspeed_cp.device.open_files import largest_run
from mindspeed_cp.doctor.operator import DTYPES
from mindspeed_cp.report.text import Table, format_bytes

#: A link below this share of the median of its kind is named.
SLOW_LINK = 0.7

BAD, WARNING, GOOD = "FAILED", "note", "ok"
Finding = tuple[str, str]
KINDS = {"in_node": "inside nodes", "network": "between nodes"}


def machine_findings(report: dict[str, Any]) -> Iterator[Finding]:
    """Yield (level, sentence) of what the report of a machine comes to: what failed, or that all is well."""
    for row in report["requirements"]:
        if not row["ok"]:
            yield BAD, f"{row['error']}; nothing was run on the NPUs"
        elif "note" in row:
            yield WARNING, row["note"]
    for row in report["version_status"]:
        if row["status"] == "refused":
            yield BAD, f"{row['package']} is {row['version']}: {row['reason']}"
    failed, total = [row for row in report["checks"] if not row["ok"]], len(report["checks"])
    profile = report["npu_profile"] or {"rows": []}
    if report["ok"]:
        rows = f"; so do all {len(profile['rows'])} rows of the npu backend's variants" if profile["rows"] else ""
        yield GOOD, f"all {total} checks of the attention operator agree with the fp64 reference{rows}"
    elif failed:
        first = f"first {failed[0]['case']} ({failed[0]['dtype']}): {_failure(failed[0])}"
        yield BAD, f"{len(failed)} of {total} checks of the attention operator differ from the fp64 reference, {first}"
    elif not total and all(row["ok"] for row in report["requirements"]):
        yield BAD, "no backend of the attention operator runs here"
    names = list(dict.fromkeys(row["name"] for row in profile["rows"] if not row["ok"]))
    if names:
        text = ", ".join(names[:6]) + f" and {len(names) - 6} more" * (len(names) > 6)
        yield BAD, f"{text}; train with the npu_profile of this device, which takes what passed (--npu-profile)"
    npus = report["devices"]["npu"]["count"]
    if npus > 1:
        yield WARNING, f"links are measured by torchrun --nproc-per-node {npus} -m mindspeed_cp doctor"


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
        checks = [((row["backend"], row["case"]), row) for row in report["checks"]]
        tables.append(_by_type(title, ("device", "check"), checks))
    if report["npu_profile"]:
        title = "Variants of the npu backend, largest difference to fp64"
        rows = [((f"npu_{row['option']}: {row['variant']}", row["name"]), row) for row in report["npu_profile"]["rows"]]
        tables.append(_by_type(title, ("variant", "shape"), rows))
    return tables


def _by_type(title: str, columns: Sequence[str], named: Sequence[tuple[tuple[str, ...], dict[str, Any]]]) -> Table:
    """Return a table with a row for each name and a column for each type."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for name, row in named:
        text = f"{_worst(row)[1]:.1e} {row.get('kernel', '')}" if row["ok"] else f"FAILED {_failure(row)}"
        rows.setdefault(name, {})[row["dtype"]] = text.rstrip()
    texts = ((*name, *(by_type.get(dtype, "-") for dtype in DTYPES)) for name, by_type in rows.items())
    return Table(title, (*columns, *DTYPES), tuple(texts))


def _worst(row: dict[str, Any]) -> tuple[str, float]:
    """Return the name of the largest difference of a row, and its size; None in the row is not finite."""
    sizes = {name: math.inf if size is None else size for name, size in row["differences"].items()}
    return max(sizes.items(), key=lambda item: item[1], default=("nothing", 0.0))


def _failure(row: dict[str, Any]) -> str:
    name, size = _worst(row)
    return row["error"] or f"{name} {size:.1e}, limit {row['limit']:.0e}"


def _version_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    machine, status_of = report["machine"], {row["package"]: row for row in report["version_status"]}
    for name, version in report["versions"].items():
        status = status_of.get(name)
        if status is None or status["status"] == "missing":
            yield name, version or "not installed"
        else:
            yield name, f"{version}: {status['status']}" + (f" ({status['reason']})" if status["reason"] else "")
    counts = (f"{machine[name]} {name[: len(name) - (machine[name] == 1)]}" for name in ("cores", "threads"))
    yield "machine", ", ".join((machine["system"], *counts))
    limit = machine["open_files"]
    enough = None if limit is None else f"enough for a run of about {largest_run(limit):,} ranks"
    yield "open files", "no limit" if limit is None else f"{limit:,} for a process (ulimit -Hn), {enough}"
    for row in report["requirements"]:
        result = f"not compared: {row['note']}" if "note" in row else "ok"
        yield f"{row['what']}, needed", result if row["ok"] else f"FAILED {row['error']}"


def _operator(backend: dict[str, Any], device_reason: str | None) -> str:
    """Return whether a backend is available; a reason that the table gives for the device is not repeated."""
    if backend["available"]:
        return f"yes: {backend['note']}" if backend.get("note") else "yes"
    return "no" if backend["why"] == device_reason else f"no: {backend['why']}"


def is_ok(report: dict[str, Any]) -> bool:
    """Return True if nothing failed and every result was right. Slow links and devices are no failure."""
    return not any(level == BAD for level, _ in findings(report))


def findings(report: dict[str, Any]) -> list[Finding]:
    """Return (level, sentence) of all findings, the worst first."""
    rows = [(BAD, f"{row['stage']}: {row['error']}") for row in report["failures"]]
    for rank, machine in enumerate(report["ranks"]):
        rows += [(level, f"rank {rank}: {text}") for level, text in machine_findings(machine) if level == BAD]
    rows += [*_algorithms(report), *_ranks(report), *_links(report)]
    return sorted(rows, key=lambda finding: (BAD, WARNING, GOOD).index(finding[0]))


def _algorithms(report: dict[str, Any]) -> Iterator[Finding]:
    runs = [row for row in report["algorithms"] if "refused" not in row]
    wrong = [row for row in runs if row["wrong"] is not None]
    for row in wrong:
        yield BAD, f"{row['algorithm']}: {row['wrong']}"
    if runs and not wrong:
        yield GOOD, f"all {len(runs)} runs of algorithms agree with the fp64 reference"


def _ranks(report: dict[str, Any]) -> Iterator[Finding]:
    facts, per_node = report["ranks"], report["ranks_per_node"]
    if facts and all(row["ok"] for row in facts):
        checks = sum(len(row["checks"]) for row in facts)
        yield GOOD, f"all {checks} checks of the operator agree with the fp64 reference"
    for text in differing_facts(facts):
        yield WARNING, f"ranks differ in {text}"
    hosts = [{row["host"] for row in facts[first : first + per_node]} for first in range(0, len(facts), per_node)]
    split = [str(node) for node, names in enumerate(hosts) if len(names) > 1]
    if split:
        yield WARNING, f"ranks of node {', '.join(split)} run on several machines"


def differing_facts(facts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield each fact that is not the same on all ranks: its values, each with the ranks that have it."""
    flat = [{"device": row["device"], **row["machine"], **row["versions"], **row["environment"]} for row in facts]
    for name in dict.fromkeys(name for row in flat for name in row):
        values: dict[str, list[int]] = {}
        for rank, row in enumerate(flat):
            value = row.get(name)
            values.setdefault("not set" if value is None else str(value), []).append(rank)
        if len(values) > 1:
            yield f"{name}: " + "; ".join(f"{value} (rank {ranks_text(ranks)})" for value, ranks in values.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks with runs of them as "0 to 3"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _link_rates(report: dict[str, Any], kind: str) -> dict[tuple[int, int], float]:
    """Return the rates of a kind of links by source and target."""
    rates: dict[tuple[int, int], float] = {}
    for row in report["links"]:
        if row["kind"] == kind:
            first, second = row["pair"]
            rates |= {(first, second): row["there"], (second, first): row["back"]}
    return rates


def _links(report: dict[str, Any]) -> Iterator[Finding]:
    for kind, name in KINDS.items():
        rates = _link_rates(report, kind)
        if not rates:
            continue
        middle = median_high(rates.values())
        slow = sorted((rate, pair) for pair, rate in rates.items() if rate < SLOW_LINK * middle)
        for rank in sorted({rank for _, pair in slow for rank in pair}):
            number = sum(rank in pair for _, pair in slow)
            if number >= 3 and number > sum(rank in pair for pair in rates) / 2:
                ends = f"{number} of the slow directions begin or end at rank {rank}"
                yield WARNING, f"links {name}: {ends}: look at its NIC or port"
        for rate, (source, target) in slow[:8]:
            share = f"{format_bytes(rate)}/s, {rate / middle:.0%} of the median"
            yield WARNING, f"link {source} to {target} ({name}) carries {share}"
        if len(slow) > 8:
            yield WARNING, f"links {name}: {len(slow) - 8} more directions are slow"
        if not slow:
            yield GOOD, f"links {name}: {format_bytes(middle)}/s in the median, none below {SLOW_LINK:.0%} of that"


def rank_tables(report: dict[str, Any]) -> list[Table]:
    """Return the tables: ranks, links, algorithms."""
    ranks = tuple(
        (str(rank), facts["host"], facts["device"], format_bytes(facts["memory"]))
        for rank, facts in enumerate(report["ranks"])
    )
    tables = [Table("Ranks", ("rank", "host", "device", "memory"), ranks)]
    for kind, name in KINDS.items():
        rates = _link_rates(report, kind)
        ends = sorted({rank for pair in rates for rank in pair})
        lines = tuple((str(a), *(f"{rates[a, b] / 1e9:.3g}" if (a, b) in rates else "" for b in ends)) for a in ends)
        if rates:
            tables.append(Table(f"Links {name}, GB/s from the rank of the line", ("", *map(str, ends)), lines))
    runs = tuple(
        (row["algorithm"], f"refused: {row['refused']}")
        if "refused" in row
        else (row["algorithm"], "ok" if row["wrong"] is None else "WRONG")
        for row in report["algorithms"]
    )
    title = "Attention over all ranks, forward and backward, beside fp64"
    return [*tables, Table(title, ("algorithm", "result"), runs)] if runs else tables
