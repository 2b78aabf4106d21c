"""Mixes of lengths, orders of documents and plans of the benchmark of the varlen ring."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.varlen_ring.__main__ import draw_rows, main, recovered
from benchmarks.varlen_ring.mixes import BORDER, SHORTEST, draw_lengths, packed_rows, sorted_rows
from benchmarks.varlen_ring.ways import (
    BASE,
    WAYS,
    Figures,
    Setting,
    as_pool,
    by_length,
    perfect_seconds,
    row_slices,
    run,
)
from mindspeed_cp import Documents, verify_plan

SETTING = Setting("h800", replicas=2, ranks=4, rows=2, context=4096)
ROWS = [np.array(row) for row in ([4096], [3000, 900, 196], [1000] * 4, [2000, 40, 2056])]


@pytest.mark.parametrize("percent", [0, 30, 100])
def test_so_much_of_the_tokens_is_in_long_documents(percent: int) -> None:
    lengths = draw_lengths(percent / 100, 2**17, np.random.default_rng(0))
    assert lengths.min() >= SHORTEST and lengths.max() <= 2**17
    assert lengths[lengths >= BORDER].sum() / lengths.sum() == pytest.approx(percent / 100, abs=0.03)


def test_sorted_rows_hold_neighbours_and_every_document() -> None:
    rows = sorted_rows(ROWS, 4096)
    assert [row.tolist() for row in rows] == [[4096], [3000], [2056, 2000], [1000] * 4, [900, 196, 40]]
    assert [len(micro_batches) for micro_batches in by_length(ROWS, SETTING)] == [3, 2], "one replica waits at the end"


def test_packed_rows_have_the_mix_of_the_documents() -> None:
    """The order of packing must not depend on lengths, as it does where both are of one random stream."""
    setting = replace(SETTING, replicas=4, rows=4, context=2**17)
    rows = draw_rows(setting, long_percent=30, seed=0)
    lengths = np.concatenate(rows)
    assert len(rows) == 16 and 0.1 < lengths[lengths >= BORDER].sum() / lengths.sum() < 0.7


def test_rows_are_packed_alike_for_a_seed() -> None:
    lengths = draw_lengths(0.5, 2**16, np.random.default_rng(1), count=500)
    first, again = (packed_rows(lengths, 2**16, 3, seed=1) for _ in range(2))
    assert all(row.tolist() == other.tolist() for row, other in zip(first, again, strict=True))
    assert all(0.8 * 2**16 < row.sum() <= 2**16 for row in first)


def test_slices_of_the_row_are_equal_wherever_documents_end() -> None:
    layout = row_slices(Documents([5, 1, 2]), 2)
    spans = [(int(span["rank"]), int(span["doc"]), int(span["stop"] - span["start"])) for span in layout.spans]
    assert sorted(spans) == [(0, 0, 4), (1, 0, 1), (1, 1, 1), (1, 2, 2)]


@pytest.mark.parametrize("name", WAYS)
def test_every_way_is_exact_and_has_every_document(name: str) -> None:
    way = WAYS[name]
    assigned = way.assign(ROWS, SETTING)
    lengths = sorted(length for replica in assigned for documents in replica for length in documents.tolist())
    assert lengths == sorted(length for row in ROWS for length in row.tolist())
    topology = SETTING.pool if way.is_pool else SETTING.replica
    verify_plan(way.build(Documents(assigned[0][0]), SETTING, topology))


def test_nothing_is_faster_than_perfect_balance_and_waiting_in_every_micro_batch_is_slower() -> None:
    perfect = perfect_seconds(ROWS, SETTING)
    for way in WAYS.values():
        figures = run(way, ROWS, SETTING)
        assert perfect < figures.step <= figures.experts and min(figures.replicas, figures.inside) >= 1 - 1e-12


def test_the_pool_lies_on_whole_nodes() -> None:
    assert (SETTING.pool.nodes, SETTING.pool.ranks_per_node) == (1, 8)
    wide = replace(SETTING, ranks=8, replicas=3)
    assert (wide.pool.nodes, wide.pool.ranks_per_node) == (3, 8)
    assert (replace(SETTING, replicas=3).pool.nodes, replace(SETTING, replicas=3).pool.ranks_per_node) == (3, 4)
    assert len(as_pool(ROWS, SETTING)) == 1


def test_what_a_way_recovers_is_of_the_loss() -> None:
    figures = {BASE: [Figures(1.8, 3.0, 1.0, 1.0)], "pool": [Figures(1.2, 1.0, 1.0, 1.0)]}
    assert recovered(figures, "pool", "step") == pytest.approx(0.75)
    assert recovered(figures, "pool", "experts") == 1 and recovered(figures, BASE, "step") == 0


def test_the_command_prints_every_way_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--replicas",
        "2",
        "--ranks",
        "2",
        "--rows",
        "1",
        "--context",
        "32768",
        "--long",
        "0",
        "60",
        "--batches",
        "1",
    ]
    assert main([*words, "--png", str(tmp_path / "x.png"), "--csv", str(tmp_path / "x.csv")]) == 0
    printed = capsys.readouterr().out
    for name in WAYS:
        assert len(re.findall(rf" % +{re.escape(name)} +[0-9]", printed)) == 2
    lines = list(csv.DictReader((tmp_path / "x.csv").read_text().splitlines()))
    assert len(lines) == 2 * len(WAYS) and all(float(line["step"]) > 1 for line in lines)
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "words, said",
    [
        ("--rows 0", "--rows is 0; valid: a whole number from 1"),
        ("--context 300", "--context is 300; valid: 32768 or more"),
        ("--long 101", "--long is 101.0; valid: percent, from 0 to 100"),
        ("--ranks 16", "--ranks is 16; valid for cluster h800: at most 8"),
        ("--png none/x.png", "--png none/x.png: there is no folder"),
        ("--cluster h9", "cluster 'h9': no such preset"),
    ],
)
def test_bad_options_are_told_in_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
