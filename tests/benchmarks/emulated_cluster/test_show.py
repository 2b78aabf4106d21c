"""Figures out of what ranks report."""

import io

import pytest

from benchmarks.cluster import show
from benchmarks.cluster.network import Shape

SHAPE = Shape(2, 2, 1, 8_000_000)  # a NIC for two ranks, a megabyte a second


def row(variant: str, number: int, seconds: float, scale: int = 1) -> show.Row:
    handed = [[0, 5, 100_000, 0], [0, 0, 0, 0], [0, 0, 0, 7], [300_000, 0, 0, 0]]
    ranks = [
        {"handed": [n * scale for n in sent], "nic_sent": sum(sent), "nic_received": 10, "cores": 1.5, "own": 0.25}
        for sent in handed
    ]
    planned = [sum(sent) * scale for sent in handed]
    return dict(
        variant=variant,
        batch="made up",
        number=number,
        seconds=seconds,
        planned=planned,
        busy=[1.0, 2.0, 3.0, 2.0],
        ranks=ranks,
    )


def test_ratios_are_of_medians_batch_by_batch():
    rows = [row("a", 0, s) for s in (4.0, 5.0, 100.0)] + [row("a", 1, 8.0)] + [row("b", 0, 2.5), row("b", 1, 1.0)]
    a, b = show.figures(rows, SHAPE, "a")
    assert a.seconds == [5.0, 8.0] and a.ratios == [1.0, 1.0]
    assert b.seconds == [2.5, 1.0] and b.ratios == [2.0, 8.0]
    assert b.busy == pytest.approx((2.0 / 2.5 + 2.0) / 2) and b.imbalance == 1.5
    assert b.own == 1.0 and b.cores == 1.5


def test_bytes_of_nics_are_those_of_their_ranks():
    (figure,) = show.figures([row("a", 0, 0.5)], SHAPE, "a")
    assert figure.planned == 400_000 and figure.counted == 100_005 + 7 + 300_000
    assert show.busiest_nic(row("a", 0, 0.5), SHAPE) == 300_007
    assert figure.busiest == pytest.approx(0.300007 / 0.5)


def test_without_the_base_there_are_no_ratios():
    assert show.figures([row("b", 0, 1.0)], SHAPE, "a")[0].ratios == []


def test_a_rank_that_sends_other_bytes_than_planned_is_told():
    good, bad = row("a", 0, 1.0), row("b", 3, 1.0)
    bad["planned"][2] += 1
    (line,) = show.wrong_bytes([good, bad])
    assert line.startswith("b, made up 3: sent")


def test_tables_hold_every_variant():
    figures = show.figures([row("a", 0, 1.0), row("b", 0, 0.5)], SHAPE, "a")
    console = show.Console(width=200, record=True, file=io.StringIO())
    console.print(show.layer_table("title", figures, 10.0, "a"))
    text = console.export_text()
    assert " 500 " in text and "50.00" in text and "2.00" in text and "1.0 of 1.5" in text
