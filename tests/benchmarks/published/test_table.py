"""Arithmetic of the tables, and the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published.__main__ import main
from benchmarks.published.systems import BASE, COMPARATORS, OURS, SYSTEMS, VARIANTS
from benchmarks.published.table import (
    Row,
    line,
    step_line,
    summarize,
    summary_text,
)


def row(cluster: str, heads: str, ring: list[float], usp: list[float], variant: list[float], ours: list[float]) -> Row:
    """A row of two batches; Ulysses cannot run it."""
    seconds: dict[str, list[float | None]] = {
        BASE: list(ring), "USP": list(usp), "Ulysses": [None, None], VARIANTS[0]: list(variant), OURS: list(ours),
    }  # fmt: skip
    return Row(cluster, heads, "one", 64, seconds, [0.9, 1.8], steps={BASE: 8.0, "USP": 4.0, OURS: 2.0})


ONE = row("a800", "mha", [8.0, 8.0], [3.0, 2.0], [1.1, 1.9], [1.0, 2.0])
TWO = row("a2", "mha", [2.0, 6.0], [2.0, 4.0], [4.0, 4.0], [1.0, 2.0])


def test_speeds_are_ratios_batch_by_batch() -> None:
    speed = ONE.speed(OURS)
    assert speed is not None and speed.tolist() == [8.0, 4.0]
    assert ONE.speed("Ulysses") is None and ONE.speed("no such system") is None
    assert ONE.against().tolist() == [3.0, 1.0], "of published systems the fastest of each batch"
    np.testing.assert_allclose(ONE.against(()), [1.1, 0.95])
    np.testing.assert_allclose(ONE.fraction, [0.9, 0.9])


def test_upper_comparators_do_not_count_among_published_systems() -> None:
    seconds = {**ONE.seconds, **{name: [0.1, 0.1] for name in COMPARATORS}}
    compared = Row("a800", "mha", "one", 64, seconds, ONE.bound)  # type: ignore[arg-type]
    assert compared.against().tolist() == ONE.against().tolist()
    assert compared.against(()).tolist() == ONE.against(()).tolist()
    speed = compared.speed(COMPARATORS[0])
    assert speed is not None and speed.tolist() == pytest.approx([80.0, 80.0]), "they have a column"


def test_every_cluster_counts_alike_in_the_mean() -> None:
    summary = summarize([ONE, ONE, TWO])
    assert summary.speed == {"a800": 6.0, "a2": 2.5} and summary.overall == 4.25
    assert summary.against == pytest.approx((2.0, 2.0, 1.0))
    assert summary.variants == pytest.approx(((1.025 + 1.025 + 2.0) / 3, 1.025, 0.95))
    assert summary.fraction == pytest.approx((0.9, 0.9, 0.9))
    said = summary_text("mha", summary)
    assert "ours over the even ring 4.25x (a800 6.00, a2 2.50)" in said and "p5 0.900" in said


def test_the_command_prints_a_table_and_writes_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    words = [
        "--clusters",
        "a2",
        "--heads",
        "gqa8",
        "--ranks",
        "8",
        "--lengths",
        "prolong",
        "--batches",
        "1",
        "--basis",
        "1",
        "--further",
        "--csv",
        str(tmp_path / "batches.csv"),
        "--json",
    ]
    assert main([*words, str(file)]) == 0
    printed = capsys.readouterr().out
    (figures,) = json.loads(file.read_text())["basis 1"]
    again = Row(**figures)
    assert line(again, list(SYSTEMS)) in printed and step_line(again, list(SYSTEMS)) in printed
    assert set(figures["seconds"]) == set(SYSTEMS) and all(len(times) == 1 for times in figures["seconds"].values())
    speed = again.speed(OURS)
    assert speed is not None and speed[0] > 1
    (batch,) = csv.DictReader((tmp_path / "batches.csv").read_text().splitlines())
    assert batch["table"] == "basis 1" and float(batch["documents"]) == again.documents[0][0]
    assert float(batch["ours ms"]) == pytest.approx(1e3 * figures["seconds"][OURS][0], abs=1e-4)
    assert float(batch["ours over it"]) == pytest.approx(again.against()[0], abs=1e-4)
    assert ("ours is not first in 0 of 1 batches" in printed) == (again.against(())[0] >= 1) == (not again.why)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--clusters a9", "cluster 'a9': no such preset"),
        ("--lengths novels", "lengths 'novels': no such distribution"),
        ("--ranks 20", "ranks is 20; valid for cluster a800"),
        ("--batches 0", "--batches is 0; valid: a whole number from 1"),
        ("--further novels", "--further has 'novels'; valid: equal, bimodal, pareto, one-giant, share+1"),
        ("--csv none/x.csv", "--csv none/x.csv: there is no folder"),
    ],
)
def test_bad_options_are_told_in_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
