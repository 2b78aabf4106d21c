"""The same call gives the same bits: out, dq, dk and dv, by every algorithm, in any order of the ranks, on any transport."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.engine import Stepping
from tests.engine.cases import VARIANTS, Case, run_all, run_here

PROBLEMS = (
    Case((129, 3, 0, 450), 1, 6, 2),
    Case((700, 40), 1, 6, 2, dtype=torch.bfloat16),
    Case((129, 3, 0, 450), 1, 6, 2, 24, 16, "full", (200, 30), True, 0.2),
)


def equal(a, b):
    """Whether the results of all ranks are the same to the bit."""
    return all(torch.equal(x, y) for of_a, of_b in zip(a, b, strict=True) for x, y in zip(of_a, of_b, strict=True))


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.thorough), 3], indirect=True)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_runs_give_the_same_bits(variant, threads):
    """The second one finds other contents in freed memory."""
    cases = [case.on(3, variant) for case in PROBLEMS]
    first, second = [run_here(case) for case in cases], [run_here(case) for case in cases[::-1]][::-1]
    assert all(equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_order_of_ranks_does_not_change_the_bits(variant):
    """The plan says in which order results are merged and gradients summed, not their arrival; nor is a buffer written
    or read while a message is under way, whenever it is copied."""
    case = PROBLEMS[0].on(5, variant)
    first = run_here(case)
    for stepping in (Stepping(lazy=True), Stepping(seed=1), Stepping(lazy=True, seed=2)):
        assert equal(run_here(case, stepping), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [3, 4])
def test_gloo_processes_give_the_same_bits(workers, ranks, dtype):
    """Every algorithm, both directions: what holds in one process holds over a process group."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes do
    try:
        cases = [replace(PROBLEMS[0].on(ranks, algorithm), dtype=dtype) for algorithm in ALGORITHMS]
        for i, results in enumerate(zip(*workers.run(ranks, run_all, cases), strict=True)):
            assert equal(results, run_here(cases[i], Stepping(lazy=i % 2 == 1))), cases[i]
    finally:
        torch.set_num_threads(before)
