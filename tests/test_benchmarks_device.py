"""The benchmarks of one device run, on a CPU and on next to nothing: no figure of theirs is looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import engine, kernels

SMALL = ["--heads", "2", "--kv-heads", "2", "--dim", "16", "--repeat", "1"]


def test_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [*SMALL, "--tokens", "300", "--bias-tokens", "50"]
    monkeypatch.setattr(sys, "argv", ["kernels", "--device", "cpu", *small, "--json", str(tmp_path / "x.json")])
    kernels.main()
    found = json.loads((tmp_path / "x.json").read_text())
    assert {row["what"] for row in found["attention"]} >= {"ours, causal", "ours, causal, ALiBi"}
    assert len(found["copies"]) == 8 and len(found["bias"]) == 2
    assert all(row["ms"] > 0 for part in ("copies", "attention", "bias") for row in found[part])


def test_virtual_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [*SMALL, "--virtual-ranks", "2", "--tokens", "256", "--lengths", "100,40,200"]
    monkeypatch.setattr(sys, "argv", ["engine", "--device", "cpu", *small, "--json", str(tmp_path / "x.json")])
    engine.main()
    found = json.loads((tmp_path / "x.json").read_text())
    for title in ("one causal document", "packed, 100,40,200"):
        assert [row["direction"] for row in found[title]] == ["forward", "both"]
        assert all(len(row["rank_ms"]) == 2 and row["efficiency"] > 0 for row in found[title])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--virtual-ranks", "3"], "--virtual-ranks is 3; valid: a divisor of --heads 32"),
        (["--device", "cuda"], "only together with --virtual-ranks"),
        (["--virtual-ranks", "2", "--lengths", "nowhere"], "no such set"),
    ],
)
def test_bad_arguments(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["engine", *arguments])
    with pytest.raises(SystemExit):
        engine.main()
    assert says in capsys.readouterr().err
