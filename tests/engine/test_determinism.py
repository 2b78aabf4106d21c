"""The same call gives the same bits: out, dq, dk and dv, by every algorithm, with one thread and with several."""

from __future__ import annotations

import time

import pytest
import torch

from tests.engine.cases import VARIANTS, Case, run, run_all

PROBLEMS = (
    Case((129, 3, 0, 450), 1, 6, 2),
    Case((700, 40), 1, 6, 2, dtype=torch.bfloat16),
    Case((129, 3, 0, 450), 1, 6, 2, 24, 16, "full", (200, 30), True, 0.2),
)


def twice(rank, group, cases, threads):
    """Whether two runs of each case agree to the bit; the second one finds other contents in freed memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pairs = zip(run_all(rank, group, cases), run_all(rank, group, cases[::-1])[::-1], strict=True)
        return [all(torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in pairs]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_runs_give_the_same_bits(workers, variant, threads):
    cases = [case.on(3, variant) for case in PROBLEMS]
    assert workers.run(3, twice, cases, threads) == [[True] * len(cases)] * 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_late_ranks_do_not_change_the_bits(workers, variant):
    """The plan says in which order results are merged and gradients summed, not their arrival."""
    case = PROBLEMS[0].on(5, variant)
    first = workers.run(5, delayed, case, 0)
    second = workers.run(5, delayed, case, 1)
    assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


def delayed(rank, group, case, late):
    """A run in which some rank starts later than the others."""
    time.sleep(0.2 if rank == late else 0)
    return run(rank, group, case)
