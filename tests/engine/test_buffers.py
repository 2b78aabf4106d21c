"""What a plan says of bytes, against what the engine does: sent on the wire, and allocated for communication."""

from __future__ import annotations

from random import Random

import pytest
import torch

from benchmarks.wire import wire
from mindspeed_cp import capabilities
from mindspeed_cp.plan import peak_bytes, traffic
from tests.engine.cases import VARIANTS, Case, attend, local
from tests.engine.draw import problem
from tests.engine.meters import BUFFERS, Meter

PROBLEMS = (
    Case((64, 31), 1, 4, 2),
    Case((129, 3, 0, 450), 1, 6, 2, 24, 16, dtype=torch.bfloat16),
    Case((40, 0, 33), 1, 5, 1, mask="full", kv_lengths=(7, 90, 0)),
    Case((300, 70), 1, 9, 3, window=(50, 0), alibi=True, dtype=torch.bfloat16),
    Case((0, 1, 2), 1, 3, 3),
)


def counted(rank, group, cases):
    """For each case and direction: bytes sent, and peak bytes of buffers, in the backward with those kept for it."""
    found = []
    for case in cases:
        plan, leaves, dout = local(rank, case)
        with wire() as there, Meter() as meter:
            out = attend(case, plan, leaves, group)
        forward = meter.peak
        meter.restart()
        with wire() as back, meter:
            torch.autograd.grad(out, leaves, dout)
        backward = meter.peak
        if plan.q_move is not None:  # the output is the caller's
            backward["moved"] -= out.untyped_storage().nbytes()
            backward["total"] -= out.untyped_storage().nbytes()
        found.append((there, back, forward, backward))
    return found


def check(workers, cases, ranks):
    """Everything agrees to the byte: sent, of each kind, and the most of each kind of buffers that is alive at once. Their
    sum is a bound, as not all kinds need have their most at the same time."""
    results = workers.run(ranks, counted, cases, timeout=120)
    for i, case in enumerate(cases):
        plan, size = case.plan(), case.dtype.itemsize
        said = traffic(plan, size)
        limits = peak_bytes(plan, "forward", size), peak_bytes(plan, "backward", size)
        for rank in range(ranks):
            there, back, *peaks = results[rank][i]
            mine = said[rank]
            assert there == {"fetch": mine["fetch_forward"], "reduce": 0, "move": mine["move_forward"]}, case
            assert back == {"fetch": mine["fetch_backward"], "reduce": mine["reduce"], "move": mine["move_backward"]}
            assert sum(there.values()) + sum(back.values()) == mine["total"]
            for direction, limit, peak in zip(("forward", "backward"), limits, peaks, strict=True):
                got = {name: (peak[name], int(limit[rank][name])) for name in BUFFERS}
                assert all(a == b for a, b in got.values()), (direction, rank, case, got)
                assert peak["total"] <= limit[rank]["total"], (direction, rank, case)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_sent_and_allocated_are_those_of_the_plan(workers, variant, ranks):
    check(workers, [case.on(ranks, variant) for case in PROBLEMS], ranks)


@pytest.mark.parametrize("ranks", [2, 5, 6])
def test_so_they_are_for_any_problem(workers, ranks):
    rng = Random(ranks)
    cells = rng.sample([cell for cell in capabilities.cells() if capabilities.refusal(cell) is None], 16)
    check(workers, [problem(cell, ranks, rng) for cell in cells], ranks)
