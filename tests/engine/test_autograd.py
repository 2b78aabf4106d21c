"""What autograd and Megatron do to an attention: a second backward, recomputation, views, several calls in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_cp import context_parallel_attention
from tests.engine.cases import VARIANTS, Case, attend, local

CASE = Case((61, 0, 130, 5), 1, heads=5, kv_heads=1, head_dim=16, head_dim_v=24)
EVERYTHING = replace(CASE, mask="full", window=(40, 30), alibi=True, dropout=0.2, kv_lengths=(50, 7, 0, 31))

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def second_backward(rank, group, case):
    plan, leaves, dout = local(rank, case)
    out = attend(case, plan, leaves, group)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return equal(first, torch.autograd.grad(out, leaves, dout))


def recompute(rank, group, case):
    plan, leaves, dout = local(rank, case)
    plain = torch.autograd.grad(attend(case, plan, leaves, group), leaves, dout)
    found = []
    for reentrant in (False, True):
        out = checkpoint(lambda *x: attend(case, plan, list(x), group), *leaves, use_reentrant=reentrant)
        for x in leaves:
            x.grad = None
        out.backward(dout)
        found.append(equal(plain, [x.grad for x in leaves]))
    return all(found)


def interleaved(rank, group, case):
    """Two micro-batches of different documents, both forwards before both backwards, as pipelines do."""
    lengths = (33, 0, 20, 90)
    other = replace(case, lengths=lengths, kv_lengths=case.kv_lengths and lengths[::-1], seed=9)
    (plan_a, a, da), (plan_b, b, db) = local(rank, case), local(rank, other)
    alone = [
        torch.autograd.grad(attend(case, plan_a, a, group), a, da),
        torch.autograd.grad(attend(other, plan_b, b, group), b, db),
    ]
    out_a, out_b = attend(case, plan_a, a, group), attend(other, plan_b, b, group)
    mixed = torch.autograd.grad(out_a, a, da), torch.autograd.grad(out_b, b, db)
    return all(equal(x, y) for x, y in zip(alone, mixed, strict=True))


def strided(rank, group, case):
    """Inputs and gradient with other strides: cut out of wider tensors, heads first, expanded."""
    plan, leaves, dout = local(rank, case)
    plain = attend(case, plan, leaves, group)
    want = torch.autograd.grad(plain, leaves, dout)
    wide = [torch.cat([x.detach(), torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]] for x in leaves]
    turned = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in leaves]
    found = []
    for views in (wide, turned):
        views = [x.requires_grad_() for x in views]
        out = attend(case, plan, views, group)
        got = torch.autograd.grad(out, views, dout.transpose(0, 2).contiguous().transpose(0, 2))
        found.append(torch.equal(out, plain) and equal(got, want))
    ones = torch.autograd.grad(attend(case, plan, leaves, group), leaves, torch.ones_like(dout))
    found.append(equal(ones, torch.autograd.grad(attend(case, plan, leaves, group).sum(), leaves)))
    return all(found)


def some_inputs(rank, group, case):
    """Gradients of some inputs only, and none at all; on every rank the same ones."""
    plan, leaves, dout = local(rank, case)
    plain = attend(case, plan, leaves, group)
    want = torch.autograd.grad(plain, leaves, dout)
    found = []
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
        inputs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(leaves)]
        out = attend(case, plan, inputs, group)
        got = torch.autograd.grad(out, [inputs[i] for i in wanted], dout)
        found.append(torch.equal(out, plain) and equal(got, [want[i] for i in wanted]))
    with torch.no_grad():
        out = attend(case, plan, leaves, group)
    return all(found) and torch.equal(out, plain) and not out.requires_grad


def left_alone(rank, group, case):
    """Neither inputs nor the gradient of the output are written to, though moves and messages read them in place."""
    plan, leaves, dout = local(rank, case)
    before = [x.detach().clone() for x in (*leaves, dout)]
    out = attend(case, plan, leaves, group)
    kept = out.detach().clone()
    torch.autograd.grad(out, leaves, dout)
    return equal(before, [x.detach() for x in (*leaves, dout)]) and torch.equal(out, kept)


@every_variant
@pytest.mark.parametrize("what", [second_backward, recompute, interleaved, strided, some_inputs, left_alone])
def test_the_bits_stay_the_same(workers, what, variant):
    for case in (CASE, EVERYTHING):
        assert workers.run(3, what, case.on(3, variant)) == [True] * 3


@pytest.mark.parametrize("variant", ["ring", "ulysses", "direct"])
def test_four_ranks_as_two_by_two(workers, variant):
    """Where copies of kv heads are summed, and every head has a rank of its own or none."""
    for case in (replace(CASE, heads=6, kv_heads=2), replace(CASE, heads=2, kv_heads=2)):
        assert workers.run(4, recompute, case.on(4, variant)) == [True] * 4


def test_autocast_changes_nothing():
    case = Case((30, 20, 200), 1)
    plan, leaves, dout = local(0, case)
    plain = context_parallel_attention(*leaves, plan)
    want = torch.autograd.grad(plain, leaves, dout)
    with torch.autocast("cpu", torch.bfloat16):
        out = context_parallel_attention(*leaves, plan)
        got = torch.autograd.grad(out, leaves, dout)
    assert torch.equal(plain, out) and equal(want, got)


def test_a_second_derivative_is_refused():
    plan, leaves, _ = local(0, Case((9, 4), 1))
    out = context_parallel_attention(*leaves, plan)
    (dq,) = torch.autograd.grad((out**2).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
