"""The table of capabilities on tensors of device "npu": the real torch_npu and ProcessGroupHCCL over the stand-in, 2, 3 and
4 ranks, against fp64. Streams are delayed at random and sends wait for their receivers, so that a wait that is missing
or a wrong order would show."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
import torch

from mindspeed_cp.algorithms import ALGORITHMS
from tests.engine.cases import Case, attend, local, worst
from tests.engine.draw import problem
from tests.engine.test_parts import PROBLEMS, Mixed
from tests.npu.ranks import run
from tools import capabilities

SIZES = (2, 3, 4)
ROUGH = {"HOST_CANN_JITTER_US": "150", "HOST_CANN_SEED": "11", "HOST_HCCL_SYNC": "1"}


def drawn(cell: capabilities.Cell) -> Case:
    """The problem that stands for a cell; always the same."""
    rng = Random(f"npu {cell}")
    return problem(cell, rng.choice(SIZES), rng)


@cache
def all_cases() -> list[Case]:
    """One for every cell that is exact. Not at import: each rank imports this file."""
    cells = (cell for cell in capabilities.all_cells() if cell.backend == "npu")
    return [drawn(cell) for cell in cells if capabilities.unsupported(cell) is None]


def attend_all(rank: int, size: int, cases: list[Case], directional: bool) -> list[list[np.ndarray]]:
    """This rank's rows of out, dq, dk and dv of every case."""
    from mindspeed_cp.comm.directional_groups import open_directional_groups, warm_up

    if directional:
        open_directional_groups(device="npu")
    results = []
    for case in cases:
        plan, leaves, dout = local(rank, case)
        on_npu = [x.detach().to("npu").requires_grad_() for x in leaves]
        warm_up(plan, device="npu")
        out = attend(case, plan, on_npu, None)
        grads = torch.autograd.grad(out, on_npu, dout.to("npu"))
        results.append([x.detach().cpu().numpy() for x in (out, *grads)])
    return results


def tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


#: One size of each algorithm runs by default: 2, 3 and 4 in turn, so that every size is there.
TABLE = [
    pytest.param(algorithm, size, id=f"{algorithm}-{size}", marks=() if i % 3 == j else pytest.mark.thorough)
    for i, algorithm in enumerate(ALGORITHMS)
    for j, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("algorithm", "size"), TABLE)
def test_every_cell_agrees_with_fp64(algorithm: str, size: int, request: pytest.FixtureRequest) -> None:
    """Every fourth cell by default."""
    cases = [c for c in all_cases() if (c.algorithm, c.ranks) == (algorithm, size) and not c.dropout]
    cases = cases if request.config.getoption("thorough") else cases[::4]
    directional = algorithm in ("ring", "double_ring", "hybrid")
    parts = run(size, attend_all, cases, directional, environment=ROUGH).values()
    largest_errors = {case: worst(case, [tensors(part[i]) for part in parts]) for i, case in enumerate(cases)}
    assert cases and {case: error for case, error in largest_errors.items() if error > 1e-5} == {}


def attend_twice(rank: int, size: int, cases: list[Case]) -> list[tuple[bool, bool, np.ndarray]]:
    """For every case whether equal seeds give equal bits, whether other seeds give others, and this rank's part of the
    sums <dout, out>, <v, dv>, <q, dq> and <k, dk>."""
    results = []
    for case in cases:
        plan, leaves, dout = local(rank, case)
        dout = dout.to("npu")
        runs = []
        for seed in (5, 5, 6):
            torch.npu.manual_seed(100 * seed + rank)
            q, k, v = (x.detach().to("npu").requires_grad_() for x in leaves)
            out = attend(case, plan, [q, k, v], None)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
            runs.append([x.detach() for x in (out, dq, dk, dv)])
        first, again, other = runs
        same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        sums = [(a.detach().double() * b.double()).sum().item() for a, b in ((dout, out), (v, dv), (q, dq), (k, dk))]
        results.append((same, torch.equal(first[0], other[0]), np.array(sums)))
    return results


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.thorough), 3, pytest.param(4, marks=pytest.mark.thorough)]
)
def test_the_backward_drops_what_the_forward_dropped(size: int, request: pytest.FixtureRequest) -> None:
    """What is dropped is drawn by the operator, so no reference is at hand. But the output is linear in the values, and
    the scores in queries and in keys: <dout, out> = <v, dv> and <q, dq> = <k, dk> over the whole batch, if and only if
    both directions drop the same."""
    step = 16 if request.config.getoption("thorough") else 48
    cases = [case for case in all_cases() if case.dropout and case.ranks == size][::step]
    parts = run(size, attend_twice, cases, environment=ROUGH).values()
    for number, case in enumerate(cases):
        results = [part[number] for part in parts]
        assert all(same for same, _, _ in results), case
        out, v, q, k = sum(sums for _, _, sums in results)
        size_of = max(1.0, abs(out), abs(q))
        assert abs(out - v) <= 1e-4 * size_of and abs(q - k) <= 1e-4 * size_of, case
    assert not all(equal for part in parts for _, equal, _ in part)


PARTS = ("GQA", "a ring", "heads split after a hybrid", "another layout held", "window", "no token")


@pytest.mark.parametrize("directional", [False, True])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_parts_agree_with_fp64(size: int, directional: bool) -> None:
    """Redistributions and exchanges under way together, as coalesced launches and through directional groups."""
    cases = [replace(PROBLEMS[name].on(size), order=order) for name in PARTS for order in (None, 3)]
    assert all(isinstance(case, Mixed) for case in cases)
    parts = run(size, attend_all, cases, directional, environment=ROUGH).values()
    largest_errors = {case: worst(case, [tensors(part[i]) for part in parts]) for i, case in enumerate(cases)}
    assert {case: error for case, error in largest_errors.items() if error > 1e-5} == {}
