"""What a run prints: lines, the bar, the summary and the comparison."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mindspeed_cp.train.comparison import comparison_sentence, comparison_text
from mindspeed_cp.train.progress_display import open_display
from mindspeed_cp.train.summary import stopped_line, summary_table

LINE = {"step": 10, "loss": 2.5, "tokens_per_s": 12345.6, "imbalance": 1.01, "grad_norm": 0.5, "lr": 1e-3}


def test_lines_are_printed_at_the_interval_and_at_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    display = open_display("auto", 0, 25, 10)  # standard output is no terminal here
    for step in range(1, 26):
        display.step({**LINE, "step": step, "seconds": 2.0})
    display.note("hello")
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/25", "10/25", "20/25", "25/25"]
    assert "loss 2.5000  12,346 tokens/s  imbalance 1.010" in lines[0] and lines[-1] == "hello"
    assert lines[0].endswith("eta 0:00:48") and lines[2].endswith("eta 0:00:10") and "eta" not in lines[3]


def test_a_bar_shows_the_same_figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    display = open_display("bar", 3, 25, 10)
    display.step(LINE)
    display.note("hello")
    display.close()
    out = capsys.readouterr().out
    for part in ("10/25", "loss 2.5000", "12,346 tokens/s", "imbalance 1.010", "hello"):
        assert part in out


def test_what_is_shown_fits_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = open_display("lines", 0, 10_000, 1)
    lines.step({**LINE, "step": 9_999, "tokens_per_s": 1234567.8, "seconds": 2.0})
    note = "a long remark about the run, with the words-in-one-piece kept " * 3
    lines.note(note)
    bar = open_display("bar", 3, 2500, 10)
    bar.step(LINE)
    bar.note(note)
    bar.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).replace("\r", "\n")
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines()) and "…" not in shown
    assert shown.count("words-in-one-piece") == 6 and "imbalance 1.010 eta" in shown and "imbalance 1.010  eta" in shown


def test_none_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = open_display("none", 0, 25, 1)
    display.step(LINE)
    display.note("hello")
    display.close()
    assert capsys.readouterr().out == ""


SUMMARY: dict[str, Any] = {
    "step": 7, "steps": 9, "stopped_by": "SIGTERM", "first_loss": 5.5, "last_loss": 2.25, "tokens": 10**6,
    "restarts": 2, "rollbacks": 0, "skipped_steps": 1,
    "tokens_per_s": 8000.0, "imbalance": 1.02, "documents": 321, "corpus_documents": 1790, "cut_documents": 12,
    "document_chunks": 40, "context": 4096, "metrics": "runs/a/metrics.jsonl", "loss_png": "runs/a/loss.png",
    "checkpoint": "runs/a/checkpoints/iter_0000007",
}  # fmt: skip


def test_the_summary_names_everything() -> None:
    text = " ".join(cell for row in summary_table(SUMMARY).rows for cell in row)
    for part in (
        "7 of 9",
        "5.500",
        "2.250",
        "8,000 tokens/s",
        "1.020",
        "12 of 1,790",
        "40 chunks",
        "runs/a/loss.png",
        "2 restarts, 1 skipped step",
    ):
        assert part in text
    line = stopped_line(SUMMARY)
    assert line is not None and "SIGTERM after step 7" in line and "iter_0000007" in line
    assert stopped_line({**SUMMARY, "stopped_by": None}) is None
    planned = {
        "replica_imbalance": 1.234,
        "planning_seconds": 2.5,
        "waiting_seconds": 0.125,
        "plans": 8,
        "cached_plans": 3,
    }
    text = " ".join(cell for row in summary_table({**SUMMARY, **planned}).rows for cell in row)
    for part in (
        "1.234 (modelled time",
        "2.50 s ahead of the steps",
        "waited 0.12 s",
        "3 of 8 plans were in the cache",
    ):
        assert part in text
    pooled = {**SUMMARY, "pooled_steps": 3, "pool_choices": 7}
    assert ("pool", "taken in 3 of 7 steps, where it was modelled to be faster") in summary_table(pooled).rows
    assert "pool" not in [row[0] for row in summary_table(SUMMARY).rows]
    empty = {**SUMMARY, "step": 0, "last_loss": None, "tokens_per_s": None, "loss_png": None, "checkpoint": None}
    assert summary_table(empty).rows


def test_the_summary_of_trees_says_what_they_save() -> None:
    rows = dict(summary_table({**SUMMARY, "flat_tokens": 4 * 10**6}).rows)
    assert "75% less" in rows["trees"] and "cut documents" not in rows


def test_the_comparison_is_a_table_and_a_sentence() -> None:
    figures = {"loss": 5.5, "imbalance": 1.0, "sent_bytes": 4 * 2.0**20, "seconds": 0.5}
    rows = [{"algorithm": "ring", **figures}, {"algorithm": "direct", **figures, "sent_bytes": 2.0**20}]
    comparison = {"batches": 3, "documents": [7, 4096], "one_machine": True, "algorithms": rows}
    text = comparison_text(comparison)
    assert "3 batches" in text and "2 documents of 7 to 4,096 tokens" in text and "500" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["ring", "direct"]
    sentence = comparison_sentence(comparison)
    assert sentence is not None and "direct sent 1.0 MiB in a step and ring 4.0 MiB, 75% less" in sentence
    assert "imbalance is not lower: 1.000 against 1.000 (1 is perfect balance, which ring has already)" in sentence
    assert "step is not faster: 500 ms against 500 (the ranks share a machine" in sentence
    better = comparison_sentence({**comparison, "algorithms": [{**rows[0], "imbalance": 1.5, "seconds": 1.0}, rows[1]]})
    assert better is not None and "imbalance is lower: 1.000 against 1.500." in better and "(" not in better
    assert "step is faster: 500 ms against 1,000." in better
    stopped = {**comparison, "algorithms": [{**rows[0], "loss": None}]}
    assert comparison_sentence(stopped) is None and "stopped" in comparison_text(stopped)
    alone = {**comparison, "algorithms": rows[:1]}  # train.compare has no other algorithm
    assert comparison_sentence(alone) is None and comparison_text(alone).splitlines()[-1].startswith("  ring")
