"""The whole table of capabilities: every cell is exact against fp64, or refused with its message."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import ConfigError
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.engine import Stepping
from tests.engine.cases import SIZES, Case, errors, run_here, worst
from tests.engine.draw import cell_of, problem
from tools import capabilities

CELLS = [cell for cell in capabilities.all_cells() if cell.backend == "cpu"]
EXACT = [cell for cell in CELLS if capabilities.unsupported(cell) is None]
REFUSED = [cell for cell in CELLS if capabilities.unsupported(cell) is not None]


def drawn(cell: capabilities.Cell, turn: int = 0) -> Case:
    """The problem that stands for a cell; always the same, as long as the names of the cell are. With this salt every
    value of every feature goes through all sizes."""
    rng = Random(f"{cell} {turn} 10")
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
def test_every_cell_agrees_with_fp64(algorithm, ranks):
    """out, dq, dk and dv of one problem of every cell; each cell has one number of ranks, drawn with the problem."""
    cases = [case for case in CASES if (case.algorithm, case.ranks) == (algorithm, ranks)]
    assert {case: error for case in cases if (error := worst(case, run_here(case))) > 1e-5} == {}


def test_the_problems_are_those_of_their_cells_and_go_through_all_sizes():
    assert [cell_of(case) for case in CASES] == EXACT
    assert len(EXACT) + len(REFUSED) == len(CELLS)
    for name, values in capabilities.FEATURES.items():
        for value in values if name != "backend" else ("cpu",):
            for algorithm in ALGORITHMS:
                sizes = {
                    case.ranks
                    for cell, case in zip(EXACT, CASES, strict=True)
                    if cell.algorithm == algorithm and getattr(cell, name) == value
                }
                assert sizes == set(SIZES) or (name == "algorithm" and value != algorithm), (name, value, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_other_cell_is_refused_and_the_message_names_the_alternative(algorithm):
    for cell in (cell for cell in REFUSED if cell.algorithm == algorithm):
        case = drawn(cell)
        assert cell_of(case) == cell
        with pytest.raises(ConfigError, match="; valid: "):
            case.plan()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(EXACT), st.sampled_from(SIZES), st.randoms(use_true_random=False))
def test_any_combination_agrees_with_fp64(cell, ranks, rng):
    case = problem(cell, ranks, rng)
    assert worst(case, run_here(case, Stepping(lazy=True))) <= 1e-5, case


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(EXACT), st.sampled_from(SIZES), st.randoms(use_true_random=False))
def test_any_combination_is_as_good_as_bf16_can_be(cell, ranks, rng):
    """dq and dk are differences, nothing where a query sees one key only, of terms that come from the rounded output."""
    case = replace(problem(cell, ranks, rng), dtype=torch.bfloat16)
    largest_errors = errors(case, run_here(case), case.reference())
    for name, bound in (("out", 2**-6), ("dq", 2**-4), ("dk", 2**-4), ("dv", 2**-6)):
        assert largest_errors[name][0] <= bound, (name, case)
