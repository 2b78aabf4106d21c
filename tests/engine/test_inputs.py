"""What a call checks, what it keeps between calls, and how it ends when a peer does not answer."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_store

from mindspeed_cp import ConfigError, Documents, PeerError, PlanError, context_parallel_attention
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.comm.group_transport import checked_timeout
from mindspeed_cp.engine import agreement, prepare
from mindspeed_cp.engine.rank_context import rank_context
from mindspeed_cp.layout import contiguous
from mindspeed_cp.ops.attention.backends import get_backend
from tests.engine.cases import Case, attend, local
from tests.limits import HANG
from tests.workers import GlooPool


def test_one_rank_needs_no_process_group():
    for algorithm in ALGORITHMS:
        case = Case((9, 4), 1, algorithm=algorithm)
        plan, leaves, dout = local(0, case)
        out = context_parallel_attention(*leaves, plan)
        for a, b in zip((out, *torch.autograd.grad(out, leaves, dout)), case.reference(), strict=True):
            assert torch.allclose(a.double(), b, atol=1e-5)


def attend_alone(rank, group, case):
    """All ranks but rank 2 take part; it lives on until they have given up."""
    store = _get_default_store()
    if rank == 2:
        store.wait(
            [f"{case.algorithm}: rank {r} gave up" for r in range(case.ranks) if r != rank], timedelta(seconds=HANG)
        )
        return None
    plan, leaves, _ = local(rank, case)
    agreement.WAIT_SECONDS = 0.1
    try:
        context_parallel_attention(*leaves, plan, group, timeout=1.5)
    except PeerError as error:
        return str(error)
    finally:
        store.set(f"{case.algorithm}: rank {rank} gave up", "")
    return None


def test_a_silent_rank_is_named_by_its_neighbour_and_everybody_ends():
    """While keys and values travel, and while heads are split. The two groups know nothing of each other."""
    workers = GlooPool(4)  # of its own: a failed group cannot be used again
    try:
        ring = workers.run(4, attend_alone, Case((300,), 4))
        ulysses = workers.run(3, attend_alone, Case((300,), 3, algorithm="ulysses"))
    finally:
        workers.close()
    assert "receiving from rank 2 (global rank 2), K and V, step 0" in ring[3]
    assert " rank 2 (global rank 2), q, k and v to heads" in ulysses[1]
    for text in (ring[0], ring[1], ring[3], ulysses[0], ulysses[1]):
        assert "no answer within 1.5 s" in text or "the connection failed" in text


def wrong_plan(rank, group, case):
    """A plan for other ranks than those of the group."""
    plan, leaves, _ = local(rank, replace(case, ranks=case.ranks - 1))
    try:
        attend(case, plan, leaves, group)
    except ConfigError as error:
        return str(error)
    return None


def test_a_plan_for_another_group_is_refused(workers):
    case = Case((30,), 3)
    for text in workers.run(2, wrong_plan, replace(case, ranks=4)):
        assert text == "the plan is for 3 ranks, but the group has 2; build the plan for the group's size"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(q=torch.zeros(12, 4, 16)), r"rank 0: q has shape \[12, 4, 16\]; the plan gives this rank \[13, 4, 16\]"),
        (dict(k=torch.zeros(13, 2, 16)), r"k has shape .* this rank \[13, 4, 16\]"),
        (dict(v=torch.zeros(13, 4, 16, dtype=torch.bfloat16)), "v is torch.bfloat16"),
        (dict(backend="tpu"), "backend is 'tpu'; valid in this version: cpu"),
        (dict(plan=Case((13,), 2).plan()), "the plan is for 2 ranks, but the group has 1"),
        (dict(timeout=-1), "timeout is -1 seconds; valid: more than 0"),
        (dict(timeout="5"), "timeout is '5' seconds; valid: more than 0"),
        (dict(timeout=None), "timeout is None seconds; valid: more than 0"),
        (dict(timeout=[5]), "timeout is .* seconds; valid: more than 0"),
        (dict(timeout=True), "timeout is True seconds; valid: more than 0"),
        (dict(timeout=float("nan")), "timeout is nan seconds; valid"),
        (dict(timeout=float("inf")), r"timeout is inf seconds; valid: more than 0, at most 1e\+09"),
        (dict(training="x"), "training is 'x'; valid: True, or False"),
        (dict(training=None), "training is None; valid: True, or False"),
        (dict(batch_digest="x"), "batch_digest is 'x'; valid: an integer"),
        (dict(batch_digest=float("nan")), "batch_digest is nan; valid: an integer"),
        (dict(batch_digest=True), "batch_digest is True; valid: an integer"),
        (dict(group="x"), "group is 'x'; valid: a torch.distributed.ProcessGroup, or None for all processes"),
        (dict(group=0), "group is 0; valid: a torch.distributed.ProcessGroup"),
        (dict(plan=Case((9, 4), 1, mask="full", kv_lengths=(2, 5)).plan()), r"k has shape \[13, 4, 16\]; the plan gives this rank \[7, 4, 16\]"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_the_plan_are_refused(change, says):
    x = torch.zeros(13, 4, 16)
    with pytest.raises(ConfigError, match=says):
        context_parallel_attention(**(dict(q=x, k=x, v=x, plan=Case((9, 4), 1).plan()) | change))


@pytest.mark.parametrize("backend", [3, 0.5, [], object(), torch.nn.Identity()])
def test_what_is_no_backend_is_refused(backend):
    plan, leaves, _ = local(0, Case((9, 4), 1))
    with pytest.raises(ConfigError, match=r"backend is .*; valid: cpu, npu, cuda, an object of one, or None"):
        context_parallel_attention(*leaves, plan, backend=backend)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_sparse_tensors_are_refused(name):
    plan, leaves, _ = local(0, Case((9, 4), 1))
    tensors = dict(zip("qkv", leaves, strict=True))
    tensors[name] = tensors[name].detach().to_sparse()
    with pytest.raises(ConfigError, match=f"{name} is of layout torch.sparse_coo; valid: a dense torch.Tensor"):
        context_parallel_attention(*tensors.values(), plan)


def test_the_shortest_timeout_is_one():
    """gloo counts milliseconds and takes 0 of them for no time-out at all."""
    assert checked_timeout(1e-9) == 0.001 and checked_timeout(np.float32(2)) == 2.0


def test_a_plan_whose_layouts_are_of_other_documents_is_refused():
    plan = Case((40,), 1).plan()
    other = replace(plan, layout=contiguous(Documents([20, 19]), 1))
    x, k = torch.zeros(39, 4, 16), torch.zeros(40, 4, 16)
    with pytest.raises(PlanError):
        context_parallel_attention(x, k, k, other)


def schedules(plan, with_dropout=False):
    cpu = get_backend("cpu")
    context = rank_context(plan, 0, cpu, torch.float32, torch.device("cpu"))
    return context.schedules(plan, cpu, "forward", with_dropout)


def test_schedules_are_built_once_and_go_with_their_plan():
    plan = Case((9, 4), 1).plan()
    first = schedules(plan)
    assert schedules(plan) is first
    prepare(plan, 0, torch.float32)
    assert schedules(plan) is first
    gone = weakref.ref(plan)
    del plan, first
    gc.collect()
    assert gone() is None


def test_a_plan_that_served_another_type_gives_the_same_bits():
    """The best calls depend on the type; those of one must not serve another."""
    case = Case((40,) * 12, 1, dtype=torch.bfloat16)
    used, fresh = case.plan(), case.plan()
    prepare(used, 0, torch.float32)
    results = []
    for plan in (used, fresh):
        q, k, v, dout = case.inputs()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = context_parallel_attention(*leaves, plan)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_evaluation_makes_the_calls_of_an_attention_without_dropout():
    plan, plain = Case((300, 40), 1, dropout=0.2).plan(), Case((300, 40), 1).plan()

    def calls(layer, drops):
        return [len(c) for step in schedules(layer, drops)[0].steps for _, c in step.compute]

    assert calls(plan, False) == calls(plain, False)
    assert sum(calls(plan, True)) > sum(calls(plan, False))
