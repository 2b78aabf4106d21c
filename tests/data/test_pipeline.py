"""Micro-batches of pipeline stages: the time of the 1F1B schedule, and how they are packed and ordered for it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.data import assign
from mindspeed_cp.data.balance import make_dispatch_problem
from mindspeed_cp.data.candidates import BACKWARD, MOST_SPLIT, pipeline_time, pipelined
from tests.data.corpora import law

BOUND = 64
FULL = 1 + BACKWARD  # forward and backward


def square(lengths: np.ndarray) -> np.ndarray:
    return 3.0 * lengths + lengths * lengths.astype(np.float64)


@pytest.mark.parametrize(("stages", "count"), [(1, 5), (2, 1), (2, 4), (4, 2), (4, 4), (4, 16), (8, 8)])
def test_equal_micro_batches_take_as_many_turns_as_there_are_and_one_for_each_other_stage(
    stages: int, count: int
) -> None:
    assert pipeline_time([7] * count, stages) == 7 * FULL * (count + stages - 1)
    assert pipeline_time([0.5] * count, stages) == 0.5 * FULL * (count + stages - 1)
    assert pipeline_time([], stages) == 0


@law
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 6))
def test_a_step_is_no_shorter_than_its_longest_chains(times: list[int], stages: int) -> None:
    """A stage has all micro-batches after the first forward has come to it, and before the last backward has left; a
    micro-batch goes through all stages and back."""
    ends = pipeline_time(times, stages)
    assert ends >= FULL * sum(times)
    assert ends >= FULL * stages * max(times)
    assert ends >= FULL * sum(times) + (stages - 1) * (times[0] + BACKWARD * times[-1])
    assert ends <= FULL * (len(times) + stages - 1) * max(times)


def test_two_stages_by_hand() -> None:
    """Forward of 1 and 4, backward twice as long. The first stage ends F1 at 5, the second one F1 at 9 and B1 at 17, the
    first one B1 at 25. In the other order the second stage ends F0 at 8 and B0 at 16, the first one B0 at 24."""
    assert pipeline_time([1, 4], 2) == 25
    assert pipeline_time([4, 1], 2) == 26


@law
@given(st.lists(st.integers(1, BOUND), min_size=1, max_size=24), st.integers(2, 5), st.booleans())
def test_packing_keeps_documents_bound_and_counts_and_is_never_slower(
    lengths: list[int], stages: int, equal_counts: bool
) -> None:
    problem = make_dispatch_problem(lengths, square, 1, BOUND, 40.0, equal_counts=equal_counts)
    assignment = assign(lengths, square, 1, token_bound=BOUND, per_micro_batch=40.0)
    given_rows = [row.tolist() for row in assignment.rows(0)]
    rows = pipelined(problem, given_rows, stages)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths))) and all(rows)
    assert max(map(problem.tokens_of, rows)) <= BOUND
    assert len(rows) == len(given_rows) if equal_counts else len(rows) <= MOST_SPLIT * len(given_rows)

    def ends(rows: list[list[int]]) -> int:
        return pipeline_time([problem.time_of(row) + problem.micro_batch_cost for row in rows], stages)

    assert ends(rows) <= ends(given_rows)


def test_the_order_is_that_of_the_schedule_and_seconds_are_its_time() -> None:
    lengths = [60, 50, 40, 30, 20, 10]
    assignment = assign(lengths, square, 1, token_bound=BOUND, stages=3)
    costs = square(np.array(lengths))
    times = [float(costs[row].sum()) for row in assignment.rows(0)]
    assert assignment.seconds[0] == pytest.approx(pipeline_time(times, 3) / (3 * FULL))
    assert assignment.seconds[0] < pipeline_time(sorted(times, reverse=True), 3) / (3 * FULL)
    best = min(pipeline_time(list(order), 3) for order in itertools.permutations(times))
    assert pipeline_time(times, 3) <= 1.05 * best


def test_more_and_shorter_micro_batches_shrink_the_bubble() -> None:
    """Short documents, 4 rows of 4 stages: 8 micro-batches take (8 + 3) / 8 of perfect balance, 4 take 7 / 4."""
    lengths = [4] * 64
    few = assign(lengths, square, 1, token_bound=BOUND)
    staged = assign(lengths, square, 1, token_bound=BOUND, stages=4)
    assert (few.counts, staged.counts) == ((4,), (8,))
    assert staged.slowest / (few.slowest / 4) == pytest.approx(11 / 8)
