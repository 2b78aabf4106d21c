"""Sentences about figures that are made up: slow links, wrong results, failures, facts that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_cp.doctor.findings import BAD, GOOD, WARNING, findings, is_ok, rank_tables


def link(kind: str, first: int, second: int, there: float = 1e9, back: float = 1e9) -> dict[str, Any]:
    return {"pair": [first, second], "kind": kind, "there": there, "back": back}


def machine(node: int) -> dict[str, Any]:
    return {
        "host": f"h{node}", "device": "CPU", "memory": 1 << 34, "environment": {"OMP_NUM_THREADS": "1"}, "ok": True,
        "machine": {"cores": 2, "threads": 1, "open_files": 1024}, "versions": {"torch": "2.13.0", "triton": None},
        "version_status": [], "requirements": [], "devices": {"npu": {"count": 0}}, "npu_profile": None,
        "checks": [{"ok": True}] * 27,
    }  # fmt: skip


@pytest.fixture
def report() -> dict[str, Any]:
    """A healthy check of two nodes of two ranks."""
    return {
        "nodes": 2, "ranks_per_node": 2, "ranks": [machine(node) for node in (0, 0, 1, 1)], "failures": [],
        "links": [link("in_node", 0, 1), link("in_node", 2, 3), link("network", 0, 2), link("network", 1, 3)],
        "algorithms": [{"algorithm": name, "wrong": None} for name in ("ring", "all_gather")],
    }  # fmt: skip


def texts(report: dict[str, Any], level: str) -> list[str]:
    return [text for found_level, text in findings(report) if found_level == level]


def test_a_healthy_cluster_has_nothing_but_good_news(report: dict[str, Any]) -> None:
    assert is_ok(report) and not texts(report, BAD) and not texts(report, WARNING)
    assert "all 2 runs of algorithms agree with the fp64 reference" in texts(report, GOOD)
    assert "all 108 checks of the operator agree with the fp64 reference" in texts(report, GOOD)


def test_a_slow_direction_is_named_with_its_ends(report: dict[str, Any]) -> None:
    report["links"][3] = link("network", 1, 3, back=2e8)
    (text,) = texts(report, WARNING)
    assert text == "link 3 to 1 (between nodes) carries 190.7 MiB/s, 20% of the median"
    assert is_ok(report)  # slow is not wrong
    (table,) = [table for table in rank_tables(report) if "between nodes" in table.title]
    assert [row for row in table.rows if row[0] in "13"] == [("1", "", "", "", "1"), ("3", "", "0.2", "", "")]


def slow_rank(report: dict[str, Any]) -> None:
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    report["links"] = [link("in_node", a, b, *([1e8] * 2 if 2 in (a, b) else [])) for a, b in pairs]


def differing_facts(report: dict[str, Any]) -> None:
    report["ranks"][3]["versions"] = {"torch": "2.12.0", "triton": None}
    report["ranks"][2]["environment"] = {"OMP_NUM_THREADS": "1", "HCCL_BUFFSIZE": "100"}
    report["ranks"][1]["machine"] = {"cores": 2, "threads": 2, "open_files": 1024}


def split_node(report: dict[str, Any]) -> None:
    report["ranks"][1]["host"] = "elsewhere"


def old_version(report: dict[str, Any]) -> None:
    status = {"package": "torch", "version": "2.1", "status": "refused", "reason": "needs 2.7"}
    report["ranks"][2] |= {"version_status": [status], "ok": False}


@pytest.mark.parametrize(
    ("change", "level", "first"),
    [
        (slow_rank, WARNING, ["links inside nodes: 6 of the slow directions begin or end at rank 2: look at its NIC or port"]),
        (differing_facts, WARNING, [
            "ranks differ in threads: 1 (rank 0, 2 to 3); 2 (rank 1)",
            "ranks differ in torch: 2.13.0 (rank 0 to 2); 2.12.0 (rank 3)",
            "ranks differ in HCCL_BUFFSIZE: not set (rank 0 to 1, 3); 100 (rank 2)",
        ]),
        (split_node, WARNING, ["ranks of node 0 run on several machines"]),
        (old_version, BAD, ["rank 2: torch is 2.1: needs 2.7"]),
    ],
)  # fmt: skip
def test_what_is_slow_or_differs_is_a_note_and_an_old_version_is_bad(
    change: Callable[[dict[str, Any]], None], level: str, first: list[str], report: dict[str, Any]
) -> None:
    change(report)
    assert texts(report, level)[: len(first)] == first
    assert is_ok(report) == (level == WARNING)


def test_failures_and_wrong_results_come_first_and_fail_the_check(report: dict[str, Any]) -> None:
    report["algorithms"][1]["wrong"] = "rank 1: dk differs from fp64 by 1.0e+00, limit 1e-05"
    failed = {
        "case": "full mask",
        "dtype": "bf16",
        "differences": {"dv": 0.5},
        "error": None,
        "limit": 2e-2,
        "ok": False,
    }
    hung = {**failed, "error": "gave no result within 120 s"}
    for rank, row in ((0, hung), (3, failed)):
        report["ranks"][rank] |= {"ok": False, "checks": [{"ok": True}, row]}
    report["failures"] = [{"stage": "links", "error": "1 - 3: rank 3: no answer"}]
    assert not is_ok(report)
    differ = "1 of 2 checks of the attention operator differ from the fp64 reference, first full mask (bf16)"
    assert [text for _, text in findings(report)[:4]] == [
        "links: 1 - 3: rank 3: no answer",
        f"rank 0: {differ}: gave no result within 120 s",
        f"rank 3: {differ}: dv 5.0e-01, limit 2e-02",
        "all_gather: rank 1: dk differs from fp64 by 1.0e+00, limit 1e-05",
    ]


def test_a_report_that_ended_early_has_the_tables_of_what_was_measured(report: dict[str, Any]) -> None:
    report |= {"links": [], "algorithms": [{"algorithm": "ulysses", "refused": "2 heads"}]}
    tables = rank_tables(report)
    assert [table.title.split()[0] for table in tables] == ["Ranks", "Attention"]
    assert tables[1].rows == (("ulysses", "refused: 2 heads"),)
