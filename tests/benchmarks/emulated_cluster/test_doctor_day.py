"""doctor on the emulated cluster: it names the NIC that is slow, and the link that is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import doctor_day
from benchmarks.cluster.fabric import missing

LACK = missing()
pytestmark = [
    pytest.mark.thorough,  # over a minute each
    pytest.mark.skipif(LACK is not None, reason=str(LACK)),
]
SMALL = ("--", "--tokens-per-rank", "128")


def rehearse(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What the first rank printed, and the figures."""
    out = doctor_day.rehearse(doctor_day.arguments([str(folder), *options]))
    results: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return out, results


def test_a_slow_nic_is_named(tmp_path: Path) -> None:
    out, results = rehearse(tmp_path, "--slow-rank", "3", "--slow-rate", "25", *SMALL)
    assert "note: link 1 to 3 (between nodes) carries" in out and "note: link 3 to 1 (between nodes) carries" in out
    rates = {tuple(row["pair"]): row["there"] for row in results["links"] if row["kind"] == "network"}
    assert rates[0, 2] > 2 * rates[1, 3]
    assert not results["failures"] and all(row["wrong"] is None for row in results["algorithms"])


def test_a_link_that_is_cut_is_the_only_one_that_is_blamed(tmp_path: Path) -> None:
    out, results = rehearse(tmp_path, "--cut", "1", "3", "--cut-after", "facts:", *SMALL, "--link-seconds", "10")
    errors = [row["error"] for row in results["failures"]]
    assert len(errors) == 2 and errors[0].startswith("1 - 3: rank "), out
    assert errors[1] == "not measured after this: join, fit, algorithms"
    assert {tuple(row["pair"]) for row in results["links"]} == {(0, 1), (2, 3), (0, 2)}
    assert len(results["kernels"]) == 4 and results["finished"]
