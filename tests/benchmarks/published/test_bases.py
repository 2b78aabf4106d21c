"""Batches of the two bases, and which of several ways counts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published import bases
from benchmarks.published.bases import (
    LAYERS,
    Bench,
    Place,
    bound,
    cut_into_rows,
    four_rows,
    pool_of,
    step_seconds,
)
from benchmarks.published.timing import layer
from mindspeed_cp import Documents
from mindspeed_cp.errors import ConfigError

ROWS = [Documents([3000, 900, 196]), Documents([4096]), Documents([2000, 2000, 96]), Documents([4000, 96])]
PLACE = Place("a800", "gqa8", 16)


def test_rows_are_full_and_have_every_token_once() -> None:
    rows = cut_into_rows(np.array([5, 10, 3, 22, 8]), 16)
    assert [row.lengths.tolist() for row in rows] == [[5, 10, 1], [2, 14], [8, 8]]
    rows = cut_into_rows(np.array([16, 16, 3]), 16)
    assert [row.lengths.tolist() for row in rows] == [[16], [16], [3]]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_second_basis_has_four_rows_of_64k_tokens(seed: int) -> None:
    rows = four_rows("prolong", seed)
    assert [row.tokens for row in rows] == [65536] * 4
    pool = pool_of(rows)
    assert pool.tokens == 64 * 4096 and pool.lengths.max() <= 65536 and pool.lengths.min() > 0
    assert sorted(pool.lengths.tolist()) == sorted(length for row in rows for length in row.lengths.tolist())
    again = four_rows("prolong", seed)
    assert all(row == other for row, other in zip(rows, again, strict=True))


def test_rows_run_beside_each_other_and_the_slowest_counts() -> None:
    timed = Bench().time("even ring", ROWS, PLACE)
    assert timed is not None and not timed.pooled and len(timed.chosen) == 4
    each = [
        layer(candidate, PLACE.case(row, 4).cluster).total for candidate, row in zip(timed.chosen, ROWS, strict=True)
    ]
    assert timed.seconds == max(each) and timed.slowest.total == max(each)
    assert {candidate.plan.ranks for candidate in timed.chosen} == {4}


@pytest.mark.parametrize("system", bases.POOLED)
def test_systems_that_place_documents_have_one_pool(system: str) -> None:
    timed = Bench().time(system, ROWS, PLACE)
    assert timed is not None and timed.pooled
    assert timed.chosen[0].plan.ranks == 16 and timed.chosen[0].plan.documents.tokens == 4 * 4096


@pytest.mark.parametrize("system", [system for system in bases.EITHER if system not in bases.REPACKED])
def test_systems_that_can_do_both_count_by_the_better(system: str) -> None:
    bench = Bench()
    timed = bench.time(system, ROWS, PLACE)
    pool = bench.time(system, [pool_of(ROWS)], PLACE)
    assert timed is not None and pool is not None
    rows = [bench.time(system, [row], Place("a800", "gqa8", 4)) for row in ROWS]
    assert timed.seconds == min(pool.seconds, max(row.seconds for row in rows if row is not None))


@pytest.mark.parametrize("system", bases.REPACKED)
def test_systems_that_pack_rows_anew_run_the_same_documents(system: str) -> None:
    rows = [Documents([4096]), Documents([4096]), Documents([512] * 8), Documents([512] * 8)]
    bench = Bench()
    timed, pool = bench.time(system, rows, PLACE), bench.time(system, [pool_of(rows)], PLACE)
    assert timed is not None and pool is not None
    as_given = [bench.time(system, [row], Place("a800", "gqa8", 4)) for row in rows]
    assert timed.seconds <= min(pool.seconds, max(row.seconds for row in as_given if row is not None))
    lengths = [length for candidate in timed.chosen for length in candidate.plan.documents.lengths.tolist()]
    assert sorted(lengths) == sorted(pool_of(rows).lengths.tolist())


def test_nothing_is_faster_than_the_bound() -> None:
    least = bound(ROWS, PLACE)
    for system in ("even ring", "Ulysses", "USP", "Zeppelin", "ours"):
        timed = Bench().time(system, ROWS, PLACE)
        assert timed is not None and timed.seconds > least


def test_a_step_is_its_micro_batches_and_its_slowest_replica() -> None:
    bench = Bench()
    forwards, other = bench.time("even ring", ROWS, PLACE), bench.time("even ring", ROWS[::-1], PLACE)
    assert forwards is not None and other is not None
    alone, both = step_seconds([forwards], PLACE), step_seconds([forwards, other], PLACE)
    assert alone < both <= 2 * alone + 1e-12, "replicas wait at the end of the step alone"
    assert 0.5 * LAYERS * forwards.seconds < alone < 1.5 * LAYERS * forwards.seconds


def test_ranks_that_are_no_whole_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks is 20; valid for cluster a800: up to 8, or a multiple of it"):
        Place("a800", "mha", 20).check()
    Place("a3", "mha", 20 - 8).check()
