"""No tensor of queries x keys exists beyond one block, whatever the mask and the bias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_cp.engine import Stepping
from tests.engine.cases import Case, all_ranks, attend_here
from tests.engine.meters import Meter

TOKENS, HEADS = 3000, 2

#: Elements of the largest block: 512 queries x 512 keys of all heads, a 34th of a mask of the whole.
BLOCK = HEADS * 512**2

LONG = Case((TOKENS,), 1, HEADS, HEADS, 8, 8)
PROBLEMS = {
    "causal": LONG,
    "full": replace(LONG, mask="full"),
    "window": replace(LONG, window=(900, 0)),
    "window on both sides": replace(LONG, mask="full", window=(700, 300)),
    "ALiBi": replace(LONG, alibi=True),
    "ALiBi, full": replace(LONG, alibi=True, mask="full"),
    "ALiBi, window, bf16": replace(LONG, alibi=True, window=(900, 0), dtype=torch.bfloat16),
    "dropout": replace(LONG, dropout=0.2),
    "keys of other lengths": replace(LONG, alibi=True, mask="full", kv_lengths=(2500,)),
}


def largest(case):
    """Elements of the largest piece of memory that a rank's forward and backward make, for each rank."""
    plan, leaves, dout = all_ranks(case)
    meters = [Meter() for _ in range(case.ranks)]
    out = attend_here(case, plan, leaves, Stepping(around=meters.__getitem__))
    torch.autograd.grad(out, [x for of_ranks in leaves for x in of_ranks], dout)
    return [max(meter.largest.values()) for meter in meters]


@pytest.mark.parametrize("algorithm", ["ring", pytest.param("ulysses", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_no_tensor_is_larger_than_a_block(problem, algorithm):
    """Nor is it smaller than a rank's queries, or the meter sees nothing."""
    for elements in largest(PROBLEMS[problem].on(2, algorithm)):
        assert TOKENS * HEADS * 8 // 2 <= elements <= BLOCK


def test_a_mask_of_the_whole_tile_would_be_noticed():
    with Meter() as meter:
        torch.zeros(1, HEADS, TOKENS // 2, TOKENS)
    assert meter.largest["engine"] > 8 * BLOCK
