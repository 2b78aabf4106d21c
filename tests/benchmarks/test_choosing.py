"""The benchmark of simulating and choosing runs, on next to nothing: no second of it is looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import choosing
from mindspeed_cp import Documents
from mindspeed_cp.choose.choose import choose_algorithm
from mindspeed_cp.data.lengths import sample_batch

SMALL = ["--repeat", "1", "--ranks", "4", "--large", "16", "--documents", "9", "--tokens", "300", "--batches", "2", "1",
         "--problems", "2"]  # fmt: skip


def test_all_rows_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["choosing", *SMALL, "--lengths", "prolong", "--json", str(file)])
    choosing.main()
    printed, rows = capsys.readouterr().out, json.loads(file.read_text())
    rows, problems = rows[:-2], rows[-2:]
    assert "regret of a default plan on 2 random problems: mean" in printed
    assert all(problem["default"] >= problem["best"] > 0 for problem in problems)
    assert [(row["what"], row["ranks"]) for row in rows] == [
        ("build a ring, prolong", 4),
        ("simulate a ring, prolong", 4),
        ("build a ring, prolong", 16),
        ("simulate a ring, prolong", 16),
        ("choose by 2 batches, prolong", 4),
        ("choose by 1 batch, prolong", 4),
    ]
    assert rows[3]["documents"] == 9 and all(row["what"] in printed and row["host_seconds"] > 0 for row in rows)
    batch = Documents(sample_batch("prolong", 1200, 0))
    decision = choose_algorithm([batch], choosing.place_of("a2", 4), choosing.ATTENTION)
    assert rows[-1]["documents"] == len(batch)
    assert rows[-1]["modelled"].startswith(f"{1e3 * decision.trials[0].seconds[0]:,.2f} ms: {decision.candidate}, ")
    assert "modelled" in printed.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "12"], "12 ranks: valid for cluster a2: up to 8, or a multiple of these"),
        (["--batches", "4", "0"], "--batches: 0; valid: a whole number from 1"),
    ],
)
def test_bad_options_are_told(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["choosing", *SMALL, *words])
    with pytest.raises(SystemExit, match="2"):
        choosing.main()
    assert said in capsys.readouterr().err
