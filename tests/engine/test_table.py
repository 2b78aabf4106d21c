"""Every exact cell of the table of capabilities against fp64; tests/config/test_capabilities.py shows what is refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp.algorithms import ALGORITHMS
from tests.engine.cases import SIZES, Case, errors, run_here, worst
from tests.engine.draw import cell_of, problem
from tools import capabilities

EXACT = [cell for cell in capabilities.all_cells() if cell.backend == "cpu" and capabilities.unsupported(cell) is None]


def drawn(cell: capabilities.Cell) -> Case:
    """The problem that stands for a cell; always the same, as long as the names of the cell are."""
    rng = Random(f"{cell} 0 10")
    return problem(cell, rng.choice(SIZES), rng)


CASES = [drawn(cell) for cell in EXACT]


@pytest.mark.parametrize(
    ("algorithm", "ranks"),
    [
        pytest.param(algorithm, ranks, marks=() if default else pytest.mark.thorough)
        for algorithm in ALGORITHMS
        for ranks in SIZES
        for default in [ranks == 3 or (ranks == 5 and algorithm == "ring")]
    ],
)
def test_every_cell_agrees_with_fp64(algorithm: str, ranks: int) -> None:
    """out, dq, dk and dv of one problem of every cell; each cell has one number of ranks, drawn with the problem."""
    cases = [case for case in CASES if (case.algorithm, case.ranks) == (algorithm, ranks)]
    assert {case: error for case in cases if (error := worst(case, run_here(case))) > 1e-5} == {}


def test_the_problem_of_a_cell_is_in_that_cell() -> None:
    assert [cell_of(case) for case in CASES] == EXACT


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(EXACT), st.sampled_from(SIZES), st.randoms(use_true_random=False))
def test_any_cell_is_as_good_as_bf16_can_be(cell: capabilities.Cell, ranks: int, rng: Random) -> None:
    """dq and dk are differences, nothing where a query sees one key only, of terms that come from the rounded output."""
    case = replace(problem(cell, ranks, rng), dtype=torch.bfloat16)
    largest_errors = errors(case, run_here(case), case.reference())
    for name, bound in (("out", 2**-6), ("dq", 2**-4), ("dk", 2**-4), ("dv", 2**-6)):
        assert largest_errors[name][0] <= bound, (name, case)
