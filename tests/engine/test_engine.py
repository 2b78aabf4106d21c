"""The engine against the dense fp64 reference: out, dq, dk and dv, forward and backward, all ranks in this process."""

from __future__ import annotations

import pytest
import torch

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.engine import Stepping, attend_in_process
from mindspeed_cp.plan import alibi_slopes
from tests.engine.cases import Case, run_here, variants, worst
from tests.plan.forests import forest_plan

PROBLEMS = {
    "packed and ragged": Case((129, 3, 0, 50, 7, 311), 1),
    "GQA": Case((61, 130, 5), 1, heads=6, kv_heads=2),
    "MQA": Case((100, 33), 1, heads=5, kv_heads=1),
    "one head": Case((64, 70), 1, heads=1, kv_heads=1),
    "more heads than some ranks, none divides": Case((90, 41), 1, heads=7, kv_heads=7),
    "kv heads cut between ranks": Case((90, 41), 1, heads=9, kv_heads=3),
    "values of another width": Case((77, 40, 1), 1, heads=4, kv_heads=2, head_dim=24, head_dim_v=16),
    "wider values": Case((77, 40, 1), 1, head_dim=8, head_dim_v=24),
    "latent attention": Case((65, 30), 1, heads=2, kv_heads=2, head_dim=192, head_dim_v=128),
    "shorter than the ranks": Case((1, 2, 3, 1, 0, 7, 1), 1),
    "one token": Case((1,), 1),
    "no token": Case((0, 0), 1),
    "no document": Case((), 1),
    "full mask": Case((129, 3, 0, 50, 7, 190), 1, mask="full", kv_heads=2),
    "window": Case((129, 3, 0, 50, 7, 190), 1, window=(30, 0)),
    "window of one token": Case((70, 12), 1, window=(0, 0)),
    "window on both sides": Case((129, 3, 0, 50, 7, 190), 1, mask="full", window=(13, 40)),
    "window that looks ahead": Case((120, 31), 1, mask="full", window=(0, 25)),
    "ALiBi": Case((129, 3, 0, 50, 7, 190), 1, heads=6, kv_heads=3, alibi=True),
    "ALiBi of one of three tensor-parallel ranks": Case((99, 31), 1, alibi=tuple(alibi_slopes(12)[4:8]), first_head=4),
    "ALiBi, full mask": Case((60, 0, 33), 1, mask="full", heads=3, kv_heads=3, alibi=True),
    "dropout": Case((129, 3, 0, 50), 1, dropout=0.3),
    "keys of other lengths": Case((40, 0, 7, 90), 1, kv_lengths=(13, 5, 0, 120), mask="full", kv_heads=2),
    "keys, but no queries": Case((0, 0), 1, kv_lengths=(9, 30), mask="full"),
    "queries, but no keys": Case((9, 30), 1, kv_lengths=(0, 0), mask="full"),
    "everything": Case((129, 3, 0, 50), 1, 6, 2, 24, 16, "full", (50, 9), True, 0.2, kv_lengths=(90, 0, 8, 70)),
    "many small documents": Case(tuple(range(40)), 1, heads=2, kv_heads=2),
    "answers to two prompts": Case((61, 30, 0, 45, 9, 1, 12), 1, kv_heads=2, parents=(-1, 0, 0, 0, -1, 4, 4)),
    "a trace that branches": Case((16, 38, 5, 1, 29, 14, 7, 2, 10), 1, parents=(-1, 0, 1, 2, 2, 1, 5, 0, -1)),
    "a chain under a window": Case((14, 33, 5, 2, 26), 1, 6, 2, window=(20, 0), parents=(-1, 0, 1, 2, 3)),
    "a tree with ALiBi": Case((14, 0, 33, 5, 26), 1, 6, 3, alibi=True, parents=(-1, 0, 1, 1, 0)),
    "images in a text": Case((129, 3, 0, 50, 7), 1, kv_heads=2, blocks=((10, 60), (60, 75), (129, 132), (140, 150))),
    "prefix language models": Case((129, 33, 50), 1, blocks=((0, 70), (129, 150), (162, 212))),
    "images under a window": Case((129, 3, 0, 90), 1, 6, 2, window=(20, 0), blocks=((10, 70), (100, 115), (135, 200))),
    "images under a window of one token": Case((39, 70), 1, window=(0, 0), blocks=((0, 4), (9, 30), (39, 100))),
    "images in a tree": Case((44, 33, 5, 26), 1, parents=(-1, 0, 0, 2), blocks=((10, 40), (50, 60), (85, 108))),
    "images, dropout": Case((60, 40), 1, dropout=0.3, blocks=((5, 50), (70, 71))),
    "a tree with dropout": Case((14, 33, 5, 26), 1, dropout=0.3, parents=(-1, 0, 0, 2)),
}


@variants()
def test_fp32_agrees_with_fp64(variant, ranks):
    """Messages are copied as late as can be for one number of ranks, and as early as can be for the next."""
    stepping = Stepping(lazy=ranks % 2 == 0)
    cases = {name: case.on(ranks, variant) for name, case in PROBLEMS.items()}
    largest_errors = {name: worst(case, run_here(case, stepping)) for name, case in cases.items()}
    assert {name: error for name, error in largest_errors.items() if error > 1e-5} == {}


WINDOWS = [(8, 1), (8, 2), (8, 4), (8, 8), (6, 2), (6, 3), (5, 5)]


@pytest.mark.parametrize(("ranks", "window"), WINDOWS)
def test_double_rings_of_any_window_are_exact(ranks, window):
    cases = [Case(lengths, ranks, 2, 1, mask=mask, algorithm="double_ring", options=(("cp_window_size", window),))
             for mask in ("causal", "full") for lengths in ((301, 7), (90, 0, 33, 5))]  # fmt: skip
    assert max(worst(case, run_here(case)) for case in cases) <= 1e-5


@pytest.mark.parametrize(("ranks", "degree"), [(8, 1), (8, 2), (8, 8), (6, 2), (6, 3), (7, 7)])
def test_hybrids_of_any_degree_are_exact(ranks, degree):
    cases = [Case((301, 7), ranks, heads, kv, alibi=alibi, algorithm="hybrid", options=(("ulysses_degree", degree),))
             for heads, kv in ((4, 2), (5, 1), (9, 3)) for alibi in (False, True)]  # fmt: skip
    assert max(worst(case, run_here(case)) for case in cases) <= 1e-5


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fp16_works_too(algorithm, ranks):
    cases = [case.on(ranks, algorithm) for case in (
        Case((300, 45), 1, dtype=torch.float16),
        Case((300, 45), 1, alibi=True, window=(90, 0), kv_heads=2, dropout=0.1, dtype=torch.float16),
    )]  # fmt: skip
    for case in cases:
        assert worst(case, run_here(case)) <= 3e-3


@pytest.mark.parametrize("seed", [*range(6), 34, 46])
def test_plans_with_relays_and_shared_slots_run_too(seed):
    """The engine knows no algorithm: plans that no builder makes are exact as well."""
    size, mask = 2 + seed % 6, ("causal", "full")[seed % 2]
    case = Case((40, 3, 0, 97, 16), size, 4, 2, mask=mask, alibi=seed % 3 == 0, seed=seed)
    plan = forest_plan(list(case.lengths), case.ranks, case.attention, seed)
    result = attend_in_process(plan, *case.inputs(), stepping=Stepping(lazy=True, seed=seed))
    for actual, exact in zip((result.out, result.dq, result.dk, result.dv), case.reference(), strict=True):
        assert float((actual - exact).abs().max()) <= 1e-5 * max(1.0, float(exact.abs().max()))
