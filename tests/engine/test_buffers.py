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
        if meter.kind_of(out) == "moved":  # the output is the caller's
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
                # Not all parts have their most at once, nor do all tensors that a remap gathers.
                remapped = plan.q_move is not None and plan.q_layout.heads is None
                loose = ("gradients", "staging") if plan.parts else ("staging",) if remapped else ()
                assert all(a == b or (a < b and name in loose) for name, (a, b) in got.items()), (direction, rank, got)
                assert peak["total"] <= limit[rank]["total"], (direction, rank, case)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_sent_and_allocated_are_those_of_the_plan(workers, variant, ranks):
    check(workers, [case.on(ranks, variant) for case in PROBLEMS], ranks)


@pytest.mark.parametrize("ranks", [2, 5, 6])
def test_so_they_are_for_any_problem(workers, ranks):
    rng = Random(ranks)
    cells = rng.sample(
        [cell for cell in capabilities.cells() if capabilities.refusal(cell) is None], 16 if ranks == 2 else 8
    )
    check(workers, [problem(cell, ranks, rng) for cell in cells], ranks)


def states(plan, rank, size):
    """Bytes beside the communication, forward and backward: the formula of `peak_bytes` and of docs/plans.md."""
    a, rounded = plan.attention, size if size < 4 else 0
    t, r = int(plan.q_layout.token_counts[rank]), int(plan.kv_layout.token_counts[rank])
    (first, last), (low, high) = plan.q_layout.head_range(rank, a.heads), plan.kv_layout.head_range(rank, a.kv_heads)
    h, g, d, e = last - first, high - low, a.head_dim, a.head_dim_v
    shared = plan.kv_move is not None and plan.kv_move.replicates
    if shared:
        r, g = int(plan.layout_kv.token_counts[rank]), a.kv_heads
    forward = t * h * (4 * e + 4) + rounded * t * h * e
    dq, dkv = rounded * t * h * d, rounded * r * g * (d + e)
    return forward, t * h * (size * e + 4) + 4 * t * h * d + (max(dq, dkv) if shared else dq + dkv)


def counted_states(rank, group, cases):
    """For each case: peak bytes of what the engine makes beside buffers, forward and backward."""
    found = []
    for case in cases:
        plan, leaves, dout = local(rank, case)
        with Meter() as meter:
            out = attend(case, plan, leaves, group)
        forward = meter.peak["engine"]
        meter.restart()
        with meter:
            torch.autograd.grad(out, leaves, dout)
        found.append((forward, meter.peak["engine"]))
    return found


@pytest.mark.parametrize("variant", ["ring", "ulysses", "hybrid", "direct"])
def test_what_comes_on_top_of_buffers_is_as_documented(workers, variant):
    """Also where ranks share a kv head, and where some have no head at all."""
    cases = [case.on(4, variant) for case in PROBLEMS]
    assert any(c.plan().kv_move is not None and c.plan().kv_move.replicates for c in cases) == (
        variant in ("ulysses", "hybrid")
    )
    results = workers.run(4, counted_states, cases, timeout=120)
    for i, case in enumerate(cases):
        expected = [states(case.plan(), rank, case.dtype.itemsize) for rank in range(4)]
        assert [result[i] for result in results] == expected, case
