"""Rank tables: handed on with their path, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.launch_scripts.scripts import (
    A2,
    A3,
    CONFIG,
    DEVICES,
    EIGHT,
    parsed,
    rank_table,
    refusal,
    run,
)


@pytest.mark.parametrize(
    ("script", "version"), [(A2, "1.0"), pytest.param(A3, "1.0", marks=pytest.mark.thorough), (A3, "1.2")]
)
def test_a_rank_table_is_handed_on_with_its_full_path(tmp_path: Path, script: Path, version: str) -> None:
    (tmp_path / "table.json").write_text(json.dumps(rank_table(2, DEVICES[script], version)))
    words = ["--dry-run", EIGHT, f"--config={CONFIG}", "--nodes=2", "--node-rank=0", "--master-addr=head"]
    done = run(script, *words, "--rank-table=table.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert parsed(done.stdout).environment["RANK_TABLE_FILE"] == str(tmp_path / "table.json")
    assert (
        parsed(run(script, *words, cwd=tmp_path, RANK_TABLE_FILE="table.json").stdout).source["RANK_TABLE_FILE"]
        == "yours"
    )


def _spoiled(table: dict[str, Any], how: str) -> str:
    if how == "not JSON":
        return json.dumps(table)[:-1]
    if how == "no list":
        return "[]"
    if how == "a device short":
        table["server_list"][1]["device"].pop()
    elif how == "ranks over both nodes":
        first, second = (server["device"][0] for server in table["server_list"])
        first["rank_id"], second["rank_id"] = second["rank_id"], first["rank_id"]
    elif how == "a rank twice":
        table["server_list"][0]["device"][0]["rank_id"] = "1"
    elif how == "version":
        table["version"] = "1.2"
    elif how == "status":
        table["status"] = "initializing"
    return json.dumps(table)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("not JSON", "is not JSON"),
        ("no list", "has no server_list"),
        ("a device short", "has 15 devices, and there are 16 ranks (2 nodes of 8)"),
        ("ranks over both nodes", "ranks are numbered node by node, 0 to 7 first"),
        ("a rank twice", "has rank_id [[1, 1, 2, 3, 4, 5, 6, 7]"),
        ("version", 'has version "1.2"; Atlas 800T A2 takes "1.0"'),
        ("status", 'has status "initializing"'),
    ],
)
def test_a_wrong_rank_table_is_refused(
    tmp_path: Path, how: str, expected: str, check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    path.write_text(_spoiled(rank_table(2, 8, "1.0"), how))
    words = ["--ranks-per-node=8", "--nodes=2", "--machine=Atlas 800T A2", "--versions=1.0"]
    assert check.main(["rank-table", str(path), *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: RANK_TABLE_FILE = {path}: ") and expected in line


def test_torch_npu_ignores_rank_tables_that_are_missing_or_links(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(rank_table(1, 8, "1.0")))
    (tmp_path / "link.json").symlink_to(tmp_path / "table.json")
    assert "is a link" in refusal(run(A2, "--dry-run", EIGHT, f"--rank-table={tmp_path}/link.json"))
    assert "cannot be read (No such file" in refusal(run(A2, "--dry-run", EIGHT, f"--rank-table={tmp_path}/none.json"))


# bad input and bad machines
