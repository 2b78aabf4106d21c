"""What a plan says of bytes, against what the engine does: sent on the wire, and allocated for communication."""

from __future__ import annotations

from contextlib import contextmanager
from random import Random
from unittest.mock import patch

import pytest
import torch

from mindspeed_cp.comm.in_memory import InMemoryTransport
from mindspeed_cp.engine import Stepping
from mindspeed_cp.layout import redistribution as layout_redistribution
from mindspeed_cp.layout.redistribution import PACKED_BYTES
from mindspeed_cp.plan import peak_bytes, traffic
from tests.engine.cases import Case, all_ranks, attend_here, filled_with_nan, variants
from tests.engine.draw import problem
from tests.engine.meters import BUFFERS, Meter
from tools import capabilities

PROBLEMS = (
    Case((64, 31), 1, 4, 2),
    Case((129, 3, 0, 450), 1, 6, 2, 24, 16, dtype=torch.bfloat16),
    Case((40, 0, 33), 1, 5, 1, mask="full", kv_lengths=(7, 90, 0)),
    Case((300, 70), 1, 9, 3, window=(50, 0), alibi=True, dtype=torch.bfloat16),
    Case((0, 1, 2), 1, 3, 3),
)


@contextmanager
def sent(ranks):
    """Bytes that each rank sends meanwhile, by kind: "fetch", "reduce" and "redistribution", between layouts."""
    counts = [dict.fromkeys(("fetch", "reduce", "redistribution"), 0) for _ in range(ranks)]
    post = InMemoryTransport.post

    def counting(self, transfers, all_to_all=False):
        for transfer in transfers:
            if transfer.sends:
                counts[self.rank][
                    {"K and V": "fetch", "dK and dV": "reduce"}.get(transfer.label.split(",")[0], "redistribution")
                ] += transfer.tensor.nbytes
        return post(self, transfers, all_to_all)

    with patch.object(InMemoryTransport, "post", counting):
        yield counts


def counted(case):
    """For each rank and direction: bytes sent, and peak bytes of buffers, in the backward with those kept for it."""
    plan, leaves, dout = all_ranks(case)
    meters = [Meter() for _ in range(case.ranks)]
    with sent(case.ranks) as there:
        out = attend_here(case, plan, leaves, Stepping(lazy=True, around=meters.__getitem__))
    forward = [meter.peak for meter in meters]
    for meter in meters:
        meter.restart()
    with sent(case.ranks) as back, filled_with_nan():
        torch.autograd.grad(out, [x for of_ranks in leaves for x in of_ranks], dout)
    backward = [meter.peak for meter in meters]
    for rank, meter in enumerate(meters):
        if meter.kind_of(out[rank]) == "redistributed":  # the output is the caller's
            backward[rank]["redistributed"] -= out[rank].untyped_storage().nbytes()
            backward[rank]["total"] -= out[rank].untyped_storage().nbytes()
    return list(zip(there, back, forward, backward, strict=True))


def assert_planned_bytes_sent(planned, there, back, case, rank):
    """Assert that a rank sent in both directions, of each kind, the bytes that the plan names."""
    assert there == {
        "fetch": planned["fetch_forward"],
        "reduce": 0,
        "redistribution": planned["redistribution_forward"],
    }, case
    assert back == {
        "fetch": planned["fetch_backward"],
        "reduce": planned["reduce"],
        "redistribution": planned["redistribution_backward"],
    }, case


def dq_bytes(part, rank):
    """Bytes of the fp32 gradient of a rank's queries, which `peak_bytes` does not count."""
    first, last = part.q_layout_compute.head_range(rank, part.attention.heads)
    return 4 * int(part.q_layout_compute.token_counts[rank]) * (last - first) * part.attention.head_dim


def check(cases, ranks):
    """Everything agrees to the byte: sent, of each kind, and the most of each kind of buffers that is alive at once, but
    that gradients take less where a slot has one part alone, which is kept as the kernel made it. The sum of all kinds
    is a bound, as not all need have their most at the same time."""
    for case in cases:
        results = counted(case)
        plan, size = case.plan(), case.dtype.itemsize
        said = traffic(plan, size)
        limits = peak_bytes(plan, "forward", size), peak_bytes(plan, "backward", size)
        for rank in range(ranks):
            there, back, *peaks = results[rank]
            dq = sum(dq_bytes(part, rank) for part in plan.parts_or_self)
            assert_planned_bytes_sent(said[rank], there, back, case, rank)
            for direction, limit, peak in zip(("forward", "backward"), limits, peaks, strict=True):
                got = {name: (peak[name], int(limit[rank][name])) for name in BUFFERS}
                # Not all parts have their most at once, nor do all tensors that a remap gathers.
                remapped = plan.q_redistribution is not None and plan.q_layout_compute.heads is None
                in_turn = remapped or plan.gradient_bytes < 4  # rows are gathered before they are rounded, one by one
                loose = ("gradients", "staging") if plan.parts or in_turn else ("gradients",)
                # A row of zeros is made while gradients of rows in several places begin: `peak_bytes` counts it in the total.
                attention = plan.attention
                row = 4 * attention.kv_heads * max(attention.head_dim, attention.head_dim_v) * (direction == "backward")
                spare = {"gradients": dq, "staging": row} if direction == "backward" else {}
                if (
                    direction == "backward"
                ):  # a part that has arrived may be kept as the sum, in the buffer of its message
                    spare["staging"] += got["gradients"][1] + dq
                    loose += ("staging",)
                assert all(
                    a == b or (a < b and name in loose) or b < a <= b + spare.get(name, 0)
                    for name, (a, b) in got.items()
                ), (direction, rank, got)
                assert peak["total"] <= limit[rank]["total"] + dq * (direction == "backward"), (
                    direction,
                    rank,
                    peak["total"],
                    limit[rank]["total"],
                    dq,
                    case,
                )


@variants(default=(3, 4), full=(1, 2, 3, 4, 8))
def test_bytes_sent_and_allocated_are_those_of_the_plan(variant, ranks):
    check([case.on(ranks, variant) for case in PROBLEMS], ranks)


@pytest.mark.parametrize("most", [1000, PACKED_BYTES], ids="q, k and v in one message: {}".format)
@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.thorough), 6])
def test_so_they_are_for_any_problem(ranks, most, monkeypatch):
    monkeypatch.setattr(layout_redistribution, "PACKED_BYTES", most)
    rng = Random(ranks)
    cells = rng.sample(
        [cell for cell in capabilities.all_cells() if capabilities.unsupported(cell) is None], 16 if ranks == 2 else 8
    )
    check([problem(cell, ranks, rng) for cell in cells], ranks)


def states(plan, rank, size):
    """Most bytes beside the communication, forward and backward: the formula of `peak_bytes` and of docs/algorithms.md,
    without dq in fp32."""
    a, rounded = plan.attention, size if size < 4 else 0
    t, r = int(plan.q_layout_compute.token_counts[rank]), int(plan.kv_layout_compute.token_counts[rank])
    (first, last), (low, high) = (
        plan.q_layout_compute.head_range(rank, a.heads),
        plan.kv_layout_compute.head_range(rank, a.kv_heads),
    )
    h, g, d, e = last - first, high - low, a.head_dim, a.head_dim_v
    shared = plan.kv_redistribution is not None and plan.kv_redistribution.has_copies
    if shared:
        r, g = int(plan.kv_layout_in.token_counts[rank]), a.kv_heads
    forward = t * h * (4 * e + 4) + rounded * t * h * e
    dq, dkv = rounded * t * h * d, rounded * r * g * (d + e)
    return forward, t * h * (size * e + 4) + (max(dq, dkv) if shared else dq + dkv)


@pytest.mark.parametrize("variant", ["ring", "ulysses", "hybrid", "direct"])
def test_what_comes_on_top_of_buffers_is_as_documented(variant):
    """Also where ranks share a kv head, and where some have no head at all."""
    cases = [case.on(4, variant) for case in PROBLEMS]
    assert any(c.plan().kv_redistribution is not None and c.plan().kv_redistribution.has_copies for c in cases) == (
        variant in ("ulysses", "hybrid")
    )
    reached = False
    for case in cases:
        for rank, (*_, forward, backward) in enumerate(counted(case)):
            most = states(case.plan(), rank, case.dtype.itemsize)
            assert forward["engine"] <= most[0] and backward["engine"] <= most[1], (case, rank)
            reached |= most == (forward["engine"], backward["engine"])
    assert reached
