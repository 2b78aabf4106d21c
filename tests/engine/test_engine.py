"""The engine against the dense fp64 reference: out, dq, dk and dv, forward and backward, on real processes."""

from __future__ import annotations

import pytest
import torch

from tests.engine.cases import NAMES, Case, errors, run

SIZES = (1, 2, 3, 4, 5, 8)

PROBLEMS = {
    "packed and ragged": Case((129, 3, 0, 50, 7, 311), 1),
    "GQA": Case((61, 130, 5), 1, heads=6, kv_heads=2),
    "MQA": Case((100, 33), 1, heads=5, kv_heads=1),
    "values of another width": Case((77, 40, 1), 1, heads=4, kv_heads=2, head_dim=24, head_dim_v=16),
    "wider values": Case((77, 40, 1), 1, head_dim=8, head_dim_v=24),
    "shorter than the ranks": Case((1, 2, 3, 1, 0, 7, 1), 1),
    "one token": Case((1,), 1),
    "no token": Case((0, 0), 1),
    "no document": Case((), 1),
    "full mask": Case((129, 3, 0, 50, 7, 190), 1, mask="full", kv_heads=2),
    "full mask, contiguous": Case((90, 31), 1, mask="full", options=(("layout", "contiguous"),)),
    "causal, contiguous": Case((90, 0, 31, 200), 1, options=(("layout", "contiguous"),)),
    "many small documents": Case(tuple(range(40)), 1, heads=2, kv_heads=2),
}


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_fp32_agrees_with_fp64(workers, problem, ranks):
    case = PROBLEMS[problem].with_ranks(ranks)
    for name, (largest, _) in errors(case, workers.run(ranks, run, case), case.reference()).items():
        assert largest <= 1e-5, name


BF16 = (
    Case((2000,), 1, 4, 4, 32, 32, dtype=torch.bfloat16),
    Case((129, 3, 0, 50, 7, 311, 700), 1, 4, 2, 32, 32, dtype=torch.bfloat16),
    Case((1024, 333, 60), 1, 4, 4, 32, 32, dtype=torch.bfloat16, seed=1),
)


def test_the_bf16_error_does_not_grow_with_the_ranks(workers):
    """At cp 8 at most 1.1 times the error at cp 1: the largest error, as a mean over problems.

    By L2 norm this holds for the gradients, which are better at cp 8. `out` is up to 1.15 times worse: the CPU kernel rounds
    the partial output of every step to bf16 before it is merged in fp32, and no fp32 output can be asked of it.
    """
    largest, l2 = {n: dict.fromkeys(NAMES, 0.0) for n in (1, 8)}, {n: dict.fromkeys(NAMES, 0.0) for n in (1, 8)}
    for case in BF16:
        reference = case.reference()
        for ranks in (1, 8):
            found = errors(case.with_ranks(ranks), workers.run(ranks, run, case.with_ranks(ranks)), reference)
            for name, (a, b) in found.items():
                largest[ranks][name] += a / len(BF16)
                l2[ranks][name] += b / len(BF16)
    for name in NAMES:
        assert largest[1][name] < 2e-2, "the kernel itself"
        assert largest[8][name] <= 1.1 * largest[1][name], (name, largest)
        assert l2[8][name] <= (1.2 if name == "out" else 1.1) * l2[1][name], (name, l2)


@pytest.mark.parametrize("ranks", [3, 8])
def test_fp16_works_too(workers, ranks):
    case = Case((300, 45), ranks, dtype=torch.float16)
    for name, (largest, _) in errors(case, workers.run(ranks, run, case), case.reference()).items():
        assert largest <= 3e-3, name
