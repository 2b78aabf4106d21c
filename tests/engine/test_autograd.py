"""What autograd and Megatron do to an attention: a second backward, recomputation, views, several calls in flight."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_cp import (
    AttentionConfig,
    ConfigError,
    Documents,
    PeerError,
    PlanError,
    Topology,
    build_plan,
    context_parallel_attention,
)
from mindspeed_cp.engine import agenda
from mindspeed_cp.layout import contiguous
from mindspeed_cp.ops.attention import backend_named
from mindspeed_cp.plan import peak_bytes
from tests.engine.cases import Case
from tests.plan.forests import forest_plan
from tests.workers import Workers

CASE = Case((61, 0, 130, 5), 3, heads=4, kv_heads=2)


def local(rank, case):
    plan = case.plan()
    q, k, v, dout = (plan.layout.shard(x, rank) for x in case.inputs())
    return plan, [x.requires_grad_() for x in (q, k, v)], dout


def second_backward(rank, group, case):
    plan, leaves, dout = local(rank, case)
    out = context_parallel_attention(*leaves, plan, group)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, dout)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_backward_may_run_twice(workers):
    assert workers.run(3, second_backward, CASE) == [True] * 3


def recompute(rank, group, case):
    plan, leaves, dout = local(rank, case)
    plain = torch.autograd.grad(context_parallel_attention(*leaves, plan, group), leaves, dout)
    out = checkpoint(lambda q, k, v: context_parallel_attention(q, k, v, plan, group), *leaves, use_reentrant=False)
    return all(torch.equal(a, b) for a, b in zip(plain, torch.autograd.grad(out, leaves, dout), strict=True))


def test_activations_may_be_recomputed(workers):
    assert workers.run(3, recompute, CASE) == [True] * 3


def interleaved(rank, group, case):
    """Two micro-batches of different documents, both forwards before both backwards, as pipelines do."""
    other = Case((33, 200), case.ranks, heads=4, kv_heads=2, seed=9)
    (plan_a, a, da), (plan_b, b, db) = local(rank, case), local(rank, other)
    alone = [
        torch.autograd.grad(context_parallel_attention(*a, plan_a, group), a, da),
        torch.autograd.grad(context_parallel_attention(*b, plan_b, group), b, db),
    ]
    out_a, out_b = context_parallel_attention(*a, plan_a, group), context_parallel_attention(*b, plan_b, group)
    mixed = torch.autograd.grad(out_a, a, da), torch.autograd.grad(out_b, b, db)
    return all(torch.equal(x, y) for p, q in zip(alone, mixed, strict=True) for x, y in zip(p, q, strict=True))


def test_micro_batches_of_different_documents_do_not_mix(workers):
    assert workers.run(3, interleaved, CASE) == [True] * 3


def strided(rank, group, case):
    plan, (q, k, v), dout = local(rank, case)
    plain = context_parallel_attention(q, k, v, plan, group)
    qkv = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(*qkv, plan, group)
    grads = torch.autograd.grad(out, qkv, dout.transpose(0, 1).contiguous().transpose(0, 1))
    want = torch.autograd.grad(plain, (q, k, v), dout)
    return torch.equal(plain, out) and all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


def test_views_are_as_good_as_contiguous_tensors(workers):
    assert workers.run(3, strided, CASE) == [True] * 3


def forest(rank, group, lengths, size, mask, seed):
    plan = forest_plan(lengths, size, AttentionConfig(4, 2, 16, mask=mask), seed)
    case = Case(tuple(lengths), size, 4, 2, mask=mask, seed=seed)
    q, k, v, dout = (plan.layout.shard(x, rank) for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = context_parallel_attention(*leaves, plan, group)
    worst = 0.0
    for a, b in zip((got, *torch.autograd.grad(got, leaves, dout)), case.reference(), strict=True):
        wrong = (a.detach().double() - plan.layout.shard(b, rank)).abs()
        worst = max(worst, float(wrong.max()) / max(1.0, float(b.abs().max())) if wrong.numel() else 0.0)
    return worst


@pytest.mark.parametrize("seed", [*range(6), 34, 46])
def test_plans_with_relays_and_shared_slots_run_too(workers, seed):
    """The engine knows no algorithm: plans that no builder makes are exact as well."""
    size, mask = 2 + seed % 6, ("causal", "full")[seed % 2]
    assert max(workers.run(size, forest, [40, 3, 0, 97, 16], size, mask, seed)) <= 1e-5


def allocated(rank, group, case):
    """Bytes of communication buffers that a forward and a backward really allocate."""
    from mindspeed_cp.engine import run as module

    plan, leaves, dout = local(rank, case)
    taken = [0]
    original, zeros = module.staging, torch.zeros_like

    def counting(like, rows, dtype):
        out = original(like, rows, dtype)
        taken[0] += out.nbytes
        return out

    def counting_zeros(x, dtype):
        out = zeros(x, dtype=dtype)
        taken[0] += out.nbytes
        return out

    module.staging = counting
    found = []
    try:
        out = context_parallel_attention(*leaves, plan, group)
        found.append(taken[0])
        taken[0] = 0
        torch.zeros_like = counting_zeros
        torch.autograd.grad(out, leaves, dout)
    finally:
        module.staging, torch.zeros_like = original, zeros
    dq = leaves[0].numel() * 4
    fetch = plan.backward.fetch
    staged = [int(i["rows"]) for i in plan.backward.reduce.items if i["dst"] == rank]
    staged += [
        int(i["rows"])
        for i, one in zip(fetch.items, fetch.is_one_run("src"), strict=True)
        if i["src"] == rank and not one
    ]
    staged_once = sum(staged) * (16 + 16) * 2 * 4
    return found[0], taken[0] - dq - staged_once


def test_the_engine_allocates_what_the_plan_says(workers):
    case = Case((64, 31), 4, heads=4, kv_heads=2)
    forward, backward = (peak_bytes(case.plan(), d, bytes_per_element=4) for d in ("forward", "backward"))
    for rank, (a, b) in enumerate(workers.run(4, allocated, case)):
        assert a == forward["total"][rank]
        assert (
            b == backward["kv"][rank] + backward["gradients"][rank]
        )  # staging comes and goes: counted apart, one message a step


def test_autocast_changes_nothing():
    case = Case((30, 20, 200), 1)
    plan, leaves, dout = local(0, case)
    plain = context_parallel_attention(*leaves, plan)
    want = torch.autograd.grad(plain, leaves, dout)
    with torch.autocast("cpu", torch.bfloat16):
        out = context_parallel_attention(*leaves, plan)
        got = torch.autograd.grad(out, leaves, dout)
    assert torch.equal(plain, out) and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_timeout_of_nothing_is_refused():
    x = torch.zeros(13, 4, 16)
    with pytest.raises(ConfigError, match="timeout is -1 seconds"):
        context_parallel_attention(x, x, x, Case((9, 4), 1).plan(), timeout=-1)


def attend_alone(rank, group, case):
    """All ranks but rank 2 take part."""
    if rank == 2:
        time.sleep(6)
        return None
    plan, leaves, _ = local(rank, case)
    start = time.monotonic()
    try:
        context_parallel_attention(*leaves, plan, group, timeout=1.5)
    except PeerError as error:
        return str(error), time.monotonic() - start
    return None


def test_a_silent_rank_is_named_by_its_neighbour_and_everybody_ends():
    workers = Workers()
    try:
        results = workers.run(4, attend_alone, Case((300,), 4))
    finally:
        workers.close()
    assert "receiving from rank 2 (global rank 2), K and V, step 0" in results[3][0]
    assert all("no answer within 1.5 s" in results[r][0] and results[r][1] < 5 for r in (0, 1, 3))


def test_one_rank_needs_no_process_group():
    case = Case((9, 4), 1)
    plan, leaves, dout = local(0, case)
    out = context_parallel_attention(*leaves, plan)
    for a, b in zip((out, *torch.autograd.grad(out, leaves, dout)), case.reference(), strict=True):
        assert torch.allclose(a.double(), b, atol=1e-5)


def test_a_second_derivative_is_refused():
    plan, leaves, _ = local(0, Case((9, 4), 1))
    out = context_parallel_attention(*leaves, plan)
    (dq,) = torch.autograd.grad((out**2).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_agendas_are_made_once_and_go_with_their_plan():
    plan = Case((9, 4), 1).plan()
    cpu = backend_named("cpu")
    first = agenda.agenda_of(plan, 0, "forward", cpu)
    assert agenda.agenda_of(plan, 0, "forward", cpu) is first
    agenda.prepare(plan, 0)
    assert agenda.agenda_of(plan, 0, "forward", cpu) is first
    gone = weakref.ref(plan)
    del plan, first
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(q=torch.zeros(12, 4, 16)), r"rank 0: q has shape \[12, 4, 16\]; the plan gives this rank \[13, 4, 16\]"),
        (dict(k=torch.zeros(13, 2, 16)), r"k has shape .* this rank \[13, 4, 16\]"),
        (dict(v=torch.zeros(13, 4, 16, dtype=torch.bfloat16)), "v is torch.bfloat16"),
        (dict(backend="cuda"), "backend is 'cuda'; valid in this version: cpu"),
        (dict(plan=Case((13,), 2).plan()), "the plan is for 2 ranks, but the group has 1"),
    ],
)
def test_inputs_that_do_not_fit_the_plan_are_refused(change, says):
    x = torch.zeros(13, 4, 16)
    with pytest.raises(ConfigError, match=says):
        context_parallel_attention(**(dict(q=x, k=x, v=x, plan=Case((9, 4), 1).plan()) | change))


def test_a_plan_with_another_compute_layout_is_refused():
    from dataclasses import replace

    documents = Documents([40])
    plan = build_plan(documents, Topology(), AttentionConfig(4, 4, 16))
    other = replace(plan, layout=contiguous(Documents([20, 20]), 1))
    x = torch.zeros(40, 4, 16)
    with pytest.raises(PlanError, match="does not redistribute"):
        context_parallel_attention(x, x, x, other)
