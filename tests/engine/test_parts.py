"""Plans of parts on the engine, against the dense fp64 reference, all ranks in this process but where it says otherwise."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from mindspeed_cp import Plan, Topology, build_plan, context_parallel_attention
from mindspeed_cp.comm.group_transport import GroupTransport
from mindspeed_cp.engine import Stepping, prepare, rank_context
from mindspeed_cp.engine.rank_context import build_rank_schedule
from mindspeed_cp.ops.attention.cpu.backend import CpuAttention
from mindspeed_cp.plan import combine, select_documents
from tests.engine.cases import Case, errors, run_here, sizes, worst
from tests.engine.test_buffers import check
from tests.engine.test_dropout import SEEN, matrix_of
from tests.layout.layouts import equal_tokens
from tests.plan.parts import mixed_plan, remapped, shuffled


@dataclass(frozen=True)
class Mixed(Case):
    """Documents treated in three ways: exchanged, and with heads split over either half of the ranks; for a caller that
    holds equal tokens (`remap`), or with steps in an order drawn from the seed `order`."""

    remap: bool = False
    order: int | None = None

    def plan(self) -> Plan:
        plan = mixed_plan(self.documents, self.ranks, self.attention, self.algorithm, self.kv_documents)
        plan = plan if self.order is None else shuffled(plan, self.order)
        return remapped(plan, equal_tokens(self.documents, self.ranks)) if self.remap else plan

    def on(self, ranks: int, variant: str | None = None) -> Mixed:
        return replace(self, ranks=ranks)


PROBLEMS = {
    "packed and ragged": Mixed((129, 3, 0, 50, 7, 311), 1, algorithm="direct"),
    "a ring": Mixed((129, 80, 33, 50, 7, 90), 1, algorithm="ring"),
    "GQA": Mixed((61, 130, 5), 1, heads=6, kv_heads=2, algorithm="direct"),
    "MQA": Mixed((100, 33, 60), 1, heads=5, kv_heads=1, algorithm="direct"),
    "one head": Mixed((64, 70, 41), 1, heads=1, kv_heads=1, algorithm="direct"),
    "kv heads cut between ranks": Mixed((90, 41, 77), 1, heads=9, kv_heads=3, algorithm="all_gather"),
    "latent attention": Mixed((65, 30, 12, 40), 1, heads=2, kv_heads=2, head_dim=192, head_dim_v=128, algorithm="direct"),
    "shorter than the ranks": Mixed((1, 2, 3, 1, 0, 7, 1), 1, algorithm="direct"),
    "one token": Mixed((0, 1), 1, algorithm="direct"),
    "no token": Mixed((0, 0), 1, algorithm="direct"),
    "only heads split": Mixed((0, 90, 0, 0, 41), 1, algorithm="direct"),
    "full mask": Mixed((129, 3, 0, 50, 7, 190), 1, mask="full", kv_heads=2, algorithm="direct"),
    "window": Mixed((129, 103, 0, 50, 7, 190), 1, window=(30, 0), algorithm="direct"),
    "ALiBi": Mixed((129, 3, 80, 50, 7, 190), 1, heads=6, kv_heads=3, alibi=True, algorithm="direct"),
    "dropout": Mixed((129, 53, 50, 20), 1, dropout=0.3, algorithm="direct"),
    "keys of other lengths": Mixed((40, 0, 7, 90, 30), 1, kv_lengths=(13, 5, 60, 0, 120), mask="full", kv_heads=2, algorithm="direct"),
    "everything": Mixed((129, 63, 40, 50), 1, 6, 2, 24, 16, "full", (50, 9), True, 0.2, kv_lengths=(90, 70, 8, 70), algorithm="direct"),
    "heads split after a hybrid": Mixed((129, 63, 40, 50), 1, heads=6, kv_heads=2, algorithm="hybrid"),
    "another layout held": Mixed((129, 63, 40, 50, 33), 1, heads=6, kv_heads=2, algorithm="direct", remap=True),
    "another layout held, ring": Mixed((129, 63, 40, 50, 33), 1, kv_heads=2, algorithm="ring", remap=True, dropout=0.1),
}  # fmt: skip


@sizes(default=(2, 3, 5))
def test_fp32_agrees_with_fp64(ranks):
    cases = {name: case.on(ranks) for name, case in PROBLEMS.items()}
    largest_errors = {name: worst(case, run_here(case, Stepping(lazy=ranks == 3))) for name, case in cases.items()}
    assert {name: error for name, error in largest_errors.items() if error > 1e-5} == {}


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_any_order_of_steps_gives_the_same(ranks):
    """Also two parts that exchange messages at the same time: a hybrid's ring and its all-to-all between others."""
    names = ("packed and ragged", "a ring", "heads split after a hybrid", "another layout held, ring")
    cases = [replace(PROBLEMS[name].on(ranks), order=seed) for name in names for seed in range(3)]
    for case in cases:
        assert worst(case, run_here(case, Stepping(lazy=True))) <= 1e-5


def two_exchanges(rank, group, case):
    """A ring for one document and `direct` for the other, in turn, through directional groups and without;
    transfers between the same two ranks that were under way together with one tag."""
    from mindspeed_cp.comm.directional_groups import open_directional_groups, warm_up
    from tests.comm.closed_groups import close_directional_groups

    numbers = np.arange(2)
    parts = [
        build_plan(select_documents(case.documents, numbers == n), Topology(1, case.ranks), case.attention, name)
        for n, name in enumerate(("ring", "direct"))
    ]
    plan, flying, twice = combine("two", parts), Counter(), []
    post = GroupTransport.post

    class Watched:
        def __init__(self, pending, key):
            self.pending, self.key = pending, key

        def wait(self):
            self.pending.wait()
            flying[self.key] -= 1

    def watched(self, transfers, all_to_all=False):
        keys = [(t.peer, t.sends, t.tag) for t in transfers]
        flying.update(keys)
        twice.extend(key for key in keys if flying[key] > 1)
        return [Watched(pending, key) for pending, key in zip(post(self, transfers, all_to_all), keys, strict=True)]

    def once():
        leaves = [plan.layout.shard(x, rank).requires_grad_() for x in case.inputs()[:3]]
        out = context_parallel_attention(*leaves, plan, group)
        return [out.detach(), *torch.autograd.grad(out, leaves, plan.layout.shard(case.inputs()[3], rank))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupTransport, "post", watched)
        first = once()
        open_directional_groups(group)
        warm_up(plan, group)
        again = once()
        close_directional_groups(group)
    both = [plan.layout.shard(x, rank) for x in case.reference()]
    wrong = max(float((a.double() - b).abs().max()) for a, b in zip(first, both, strict=True))
    return wrong, all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), twice, sum(flying.values())


def test_two_exchanges_at_once_have_tags_of_their_own_and_go_through_directional_groups(workers):
    for wrong, same, twice, left in workers.run(8, two_exchanges, Case((90, 133), 8, 4, 2)):
        assert wrong < 1e-5 and same and not twice and not left


@pytest.mark.parametrize("ranks", [2, 8])
def test_bf16(ranks):
    """As good as the kernel itself."""
    cases = [
        replace(PROBLEMS[name], ranks=ranks, head_dim=32, head_dim_v=32, dtype=torch.bfloat16)
        for name in ("packed and ragged", "GQA", "ALiBi", "another layout held")
    ]
    alone = [replace(case, ranks=1) for case in cases]
    for i, case in enumerate(cases):
        largest_errors = errors(case, run_here(case), case.reference())
        there = errors(alone[i], run_here(alone[i]), case.reference())
        for name, (largest, l2) in largest_errors.items():
            assert largest < 2e-2 and l2 <= 1.3 * there[name][1], (name, case, l2, there)


@pytest.mark.parametrize("ranks", [3, 8])
def test_the_same_weights_are_dropped_as_without_parts(ranks):
    alone = matrix_of(SEEN)
    fields = {name: getattr(SEEN, name) for name in Case.__dataclass_fields__}
    case = Mixed(**{**fields, "ranks": ranks, "algorithm": "direct"})
    matrix = matrix_of(case)
    assert torch.equal(matrix == 0, alone == 0)
    assert torch.allclose(matrix, alone, atol=1e-6)


@sizes(default=(3,), full=(1, 3, 8))
def test_bytes_sent_and_allocated_are_those_of_the_plan(ranks):
    """What is sent agrees to the byte, and so do receive buffers and what moves and gathers make; gradients and staging
    are bounds: their parts' largest moments need not meet."""
    cases = [
        replace(case.on(ranks), dtype=dtype)
        for name, case in PROBLEMS.items()
        if name not in ("latent attention", "dropout", "full mask")
        for dtype in ((torch.bfloat16,) if ranks == 8 else (torch.float32, torch.bfloat16))
    ]
    check(cases, ranks)


def test_everything_is_made_by_prepare_and_goes_with_the_plan(monkeypatch):
    plan = Mixed((40, 30, 20), 1, dropout=0.1).plan()
    prepare(plan, 0, torch.float32)
    monkeypatch.setattr(rank_context, "build_rank_schedule", None)
    monkeypatch.setattr(rank_context, "build_rank_parts", None)
    leaves = [torch.randn(90, 4, 16, requires_grad=True) for _ in range(3)]
    out = context_parallel_attention(*leaves, plan, dropout_key=(1, 2))
    torch.autograd.grad(out.sum(), leaves)
    gone = weakref.ref(plan), weakref.ref(plan.parts[0])
    del plan, out
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_messages_of_a_direction_have_numbers_of_their_own(direction: str) -> None:
    """Tags are made of them: keys and gradients that are in flight at once are told apart."""
    plan = Case((129, 50, 311), 4, algorithm="direct", options=(("prefetch", 2),)).plan()
    for rank in range(plan.ranks):
        steps = build_rank_schedule(
            plan, rank, direction, CpuAttention(), torch.float32, False, torch.device("cpu")
        ).steps
        numbers = [op.number for step in steps for op in step.p2p_ops]
        assert len(numbers) == len(set(numbers)) > 0
        assert sorted(numbers) == sorted(number for step in steps for number in step.wait_for)
