"""Arithmetic of the tables, and the command."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published.__main__ import main
from benchmarks.published.systems import BASE, COMPARATORS, OURS, SYSTEMS, VARIANTS
from benchmarks.published.table import (
    REPORTED,
    RESULT,
    SETTING,
    Row,
    assumptions,
    batch_lines,
    beside_reported,
    for_cluster,
    header,
    line,
    markdown,
    step_line,
    summarize,
    summary_text,
    target_text,
    why_slower,
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


def test_a_line_has_a_column_for_every_system() -> None:
    systems = [name for name in SYSTEMS if name in ONE.seconds]
    text = line(ONE, systems)
    assert len(text) == len(header(systems))
    assert text.split() == [
        "a800",
        "one",
        "mha",
        "64",
        "8000.0",
        "-",
        "3.33x",
        "5.74x",
        "6.00x",
        "2.00",
        "1.00",
        "0.900",
    ]
    assert step_line(ONE, systems).split() == [
        "a800",
        "one",
        "mha",
        "64",
        "8.00",
        "-",
        "2.00x",
        "-",
        "4.00x",
        "2.00",
        "s",
    ]


def test_the_table_of_the_page_is_over_all_sets_of_lengths() -> None:
    lines = markdown("basis 2", [ONE, row("a800", "mha", [8.0, 8.0], [1.0, 2.0], [9.0, 9.0], [1.0, 1.0])])
    assert lines[4].split(" | ")[:4] == ["| a800", "mha", "64", "8000.0"] and len(lines) == 6
    assert lines[4].split(" | ")[4:] == ["4.67", "-", "3.32", "7.00", "1.75, 1.00", "1.125 |"]
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")


def test_the_first_batches_of_a_row() -> None:
    first_batch = ONE.first(1)
    assert (
        first_batch.against().tolist() == [3.0]
        and first_batch.fraction.tolist() == [0.9]
        and ONE.against().tolist() == [3.0, 1.0]
    )


def test_a_row_that_is_lost_says_what_takes_the_time() -> None:
    said = why_slower((0.02, 0.018, 0.016), (0.0161, 0.0172, 0.0025), (0.017, 0.0175, 0.0003))
    assert said == (
        "ours 20.00 ms: busy 16.10 on average, 17.20 at most, waits 2.50; it 18.00 ms: busy 17.00 on average, "
        "17.50 at most, waits 0.30; bound 16.00"
    )


def test_reported_figures_stand_beside_the_clusters_they_are_from() -> None:
    assert {figure.system for figure in for_cluster("a800")} == {"Zeppelin"} and not for_cluster("a3")
    assert {figure.system for figure in for_cluster("a2")} == {"DHP"}
    assert all(figure.source and figure.figure for figure in REPORTED)
    text = "\n".join(assumptions(["a800", "a3"], ["wikipedia"], bf16=False, placements=4))
    assert "modelled" in text and "4,096 tokens a rank" in text and "attention reaches 0.6" in text
    assert "[reported] Zeppelin 2.80x" in text and "[reported] nothing for this cluster" in text
    zeppelin = Row("a800", "mha", "one", 64, {BASE: [8.0, 4.0], "Zeppelin": [2.0, 2.0], OURS: [1.0, 1.0]}, [1.0, 1.0])
    said = beside_reported([zeppelin, TWO])
    assert said[0].startswith(
        "Zeppelin on a800: modelled 3.00x the even ring on average, up to 4.00x; [reported] 2.80x"
    )


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


def test_further_sets_have_a_table_of_each_basis_and_equal_batches_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--clusters", "a3", "--heads", "gqa8", "--batches", "4", "--basis", "--further", "one-giant", "--no-steps"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for table in ("one row over 64 ranks", "64K contexts on 64 ranks"):
        target = rf"further sets: {table}: at least 0.98 times as fast as the fastest published in all.* of 1 batches"
        assert re.search(target, printed), "both seeds draw the same documents"
    assert "basis 1" not in printed and "basis 2" not in printed


def test_a_line_of_the_file_has_the_fastest_published_system_and_empty_cells_for_those_that_cannot() -> None:
    seconds = {name: [None] if name == "Ulysses" else [0.004] for name in SYSTEMS}
    seconds |= {OURS: [0.002], VARIANTS[0]: [0.001], COMPARATORS[0]: [0.001], "USP": [0.003]}
    row = Row("a2", "mha", "pareto", 64, seconds, [0.0015], seeds=[3], documents=[(20, 700)])  # type: ignore[arg-type]
    ((*setting, bound),) = [cells[: len(SETTING)] for cells in batch_lines("basis 2", row)]
    assert setting == ["basis 2", "a2", "mha", "pareto", 64, 3, 20, 700] and bound == "1.5000"
    (cells,) = batch_lines("basis 2", row)
    assert cells[-len(RESULT) :] == ["USP", "1.5000", "0.7500"]
    assert cells[len(SETTING) + list(SYSTEMS).index("Ulysses")] == ""


def test_the_target_counts_the_batches_below_it() -> None:
    assert target_text("x", [ONE, TWO], 0.9).endswith("fastest published in all of 4 batches")
    assert target_text("x", [ONE, TWO], 1.5).endswith("fastest published in all but 1 of 4 batches")


def test_bf16_shortens_layers_and_steps_of_others_alone(tmp_path: Path) -> None:
    calls, file = [], tmp_path / "figures.json"
    words = f"--clusters a800 --heads mha --ranks 16 --lengths wikipedia --batches 1 --basis 1 --json {file} --further".split()
    for switch in ([], ["--bf16"]):
        assert main([*words, *switch]) == 0
        calls.append(Row(**json.loads(file.read_text())["basis 1"][0]))
    fp32, bf16 = calls
    able = [name for name in SYSTEMS if fp32.seconds[name][0] is not None]
    layers = {name: bf16.seconds[name][0] / fp32.seconds[name][0] for name in able}  # type: ignore[operator]
    assert layers[OURS] == 1 and bf16.steps[OURS] == fp32.steps[OURS]
    for name in (BASE, "double ring", "USP"):
        assert layers[name] < 0.9 and bf16.steps[name] / fp32.steps[name] == pytest.approx(layers[name], rel=0.02)


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
