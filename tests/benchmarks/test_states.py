"""The benchmark of states runs, on next to nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import states


def test_placements_and_schedules_have_their_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["states", "--clusters", "a2", "--json", str(tmp_path / "states.json")])
    monkeypatch.setattr(states, "ROWS", ((2**13, 8),))
    states.main()
    rows = json.loads((tmp_path / "states.json").read_text())
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 3
    documents = [row for row in rows if "layout" in row]
    assert all(row["heads bytes"] > 0 and row["relay"] <= 0.1 for row in documents if row["ranks"] == 8)
    borders = {row["placement"]: row["of rank"] for row in rows if row.get("median") == 2**12}
    assert borders["row in order"] <= 1 < borders["zig-zag"]


def test_a_layer_on_this_host_has_its_share_of_ideal() -> None:
    assert [row["kind"] for row in states.host(tokens=64)] == ["gated_delta", "kda", "mamba2"]
