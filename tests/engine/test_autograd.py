"""What autograd and Megatron do to an attention: a second backward, recomputation, views, several calls in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_cp import context_parallel_attention
from tests.engine.cases import VARIANTS, Case, all_ranks, attend_here, local

CASE = Case((61, 0, 130, 5), 1, heads=5, kv_heads=1, head_dim=16, head_dim_v=24)
EVERYTHING = replace(CASE, mask="full", window=(40, 30), alibi=True, dropout=0.2, kv_lengths=(50, 7, 0, 31))


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def problem(case):
    """The plan, leaves of all ranks (q of every rank, then k, then v), and gradients of the outputs."""
    plan, leaves, dout = all_ranks(case)
    return plan, [x for of_ranks in leaves for x in of_ranks], dout


def attend(case, plan, leaves):
    """The outputs of all ranks, as one tuple."""
    n = case.ranks
    return tuple(attend_here(case, plan, [leaves[:n], leaves[n : 2 * n], leaves[2 * n :]]))


def second_backward(case):
    plan, leaves, dout = problem(case)
    out = attend(case, plan, leaves)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return equal(first, torch.autograd.grad(out, leaves, dout))


def recompute(case):
    plan, leaves, dout = problem(case)
    plain = torch.autograd.grad(attend(case, plan, leaves), leaves, dout)
    results = []
    for reentrant in (False, True):
        out = checkpoint(lambda *x: attend(case, plan, list(x)), *leaves, use_reentrant=reentrant)
        for x in leaves:
            x.grad = None
        torch.autograd.backward(out, dout)
        results.append(equal(plain, [x.grad for x in leaves]))
    return all(results)


def interleaved(case):
    """Two micro-batches of different documents, both forwards before both backwards, as pipelines do."""
    lengths = (33, 0, 20, 90)
    other = replace(case, lengths=lengths, kv_lengths=case.kv_lengths and lengths[::-1], seed=9)
    (plan_a, a, da), (plan_b, b, db) = problem(case), problem(other)
    alone = [
        torch.autograd.grad(attend(case, plan_a, a), a, da),
        torch.autograd.grad(attend(other, plan_b, b), b, db),
    ]
    out_a, out_b = attend(case, plan_a, a), attend(other, plan_b, b)
    mixed = torch.autograd.grad(out_a, a, da), torch.autograd.grad(out_b, b, db)
    return all(equal(x, y) for x, y in zip(alone, mixed, strict=True))


def strided(case):
    """Inputs and gradient with other strides: cut out of wider tensors, heads first, expanded."""
    plan, leaves, dout = problem(case)
    plain = attend(case, plan, leaves)
    want = torch.autograd.grad(plain, leaves, dout, retain_graph=True)
    wide = [torch.cat([x.detach(), torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]] for x in leaves]
    turned = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in leaves]
    results = []
    for views in (wide, turned):
        views = [x.requires_grad_() for x in views]
        out = attend(case, plan, views)
        got = torch.autograd.grad(out, views, [x.transpose(0, 2).contiguous().transpose(0, 2) for x in dout])
        results.append(equal(out, plain) and equal(got, want))
    ones = torch.autograd.grad(plain, leaves, [torch.ones_like(x) for x in dout], retain_graph=True)
    results.append(equal(ones, torch.autograd.grad(sum(x.sum() for x in plain), leaves)))
    return all(results)


def some_inputs(case):
    """Gradients of some inputs only, and none at all; on every rank the same ones."""
    plan, leaves, dout = problem(case)
    plain = attend(case, plan, leaves)
    want = torch.autograd.grad(plain, leaves, dout)
    results = []
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
        numbers = [i for i in range(len(leaves)) if i // case.ranks in wanted]
        inputs = [x.detach().requires_grad_(i in numbers) for i, x in enumerate(leaves)]
        out = attend(case, plan, inputs)
        got = torch.autograd.grad(out, [inputs[i] for i in numbers], dout)
        results.append(equal(out, plain) and equal(got, [want[i] for i in numbers]))
    with torch.no_grad():
        out = attend(case, plan, leaves)
    return all(results) and equal(out, plain) and not any(x.requires_grad for x in out)


def left_alone(case):
    """Neither inputs nor the gradient of the output are written to, though messages read them in place."""
    plan, leaves, dout = problem(case)
    before = [x.detach().clone() for x in (*leaves, *dout)]
    out = attend(case, plan, leaves)
    kept = [x.detach().clone() for x in out]
    torch.autograd.grad(out, leaves, dout)
    return equal(before, [x.detach() for x in (*leaves, *dout)]) and equal(out, kept)


DEFAULT = ("ring", "hybrid", "direct, 3 rounds ahead", "hierarchical, KV fetch")


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.thorough) for name in VARIANTS]
)
@pytest.mark.parametrize("what", [second_backward, recompute, interleaved, strided, some_inputs, left_alone])
def test_the_bits_stay_the_same(what, variant):
    for case in (CASE, EVERYTHING):
        assert what(case.on(3, variant))


@pytest.mark.parametrize("variant", ["ring", "ulysses", "direct"])
def test_four_ranks_as_two_by_two(variant):
    """Where copies of kv heads are summed, and every head has a rank of its own or none."""
    for case in (replace(CASE, heads=6, kv_heads=2), replace(CASE, heads=2, kv_heads=2)):
        assert recompute(case.on(4, variant))


def recompute_on_gloo(rank, group, case):
    plan, leaves, dout = local(rank, case)
    key = case.dropout_key
    plain = torch.autograd.grad(context_parallel_attention(*leaves, plan, group, dropout_key=key), leaves, dout)
    out = checkpoint(
        lambda *x: context_parallel_attention(*x, plan, group, dropout_key=key), *leaves, use_reentrant=False
    )
    return equal(plain, torch.autograd.grad(out, leaves, dout))


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_recomputation_over_a_process_group(workers, algorithm):
    assert workers.run(3, recompute_on_gloo, EVERYTHING.on(3, algorithm)) == [True] * 3


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
