"""No tensor of queries x keys exists beyond one block, whatever the mask and the bias."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mindspeed_cp.engine import Stepping
from tests.engine.cases import Case, all_ranks, attend, attend_here, local
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


def most_memory(rank, group, case):
    """Bytes by which the memory of the process grows at most; kernels' own, which no torch operation shows, included."""
    plan, leaves, dout = local(rank, case)
    before = high_water(reset=True)
    torch.autograd.grad(attend(case, plan, leaves, group), leaves, dout)
    return high_water() - before


def high_water(reset: bool = False) -> int:
    """Bytes of memory that this process had at most, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def one_mask(rank, group):
    before = high_water(reset=True)
    torch.ones(1, HEADS, 4000, 8000)
    return high_water() - before


def test_such_a_mask_would_be_noticed(workers):
    assert workers.run(1, one_mask)[0] > 240 * 2**20


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(name, marks=() if name in ("causal", "ALiBi, window, bf16") else pytest.mark.thorough)
        for name in PROBLEMS
        if name != "dropout"
    ],
)
def test_memory_grows_with_the_tokens_not_with_their_square(workers, problem):
    """8,000 tokens of 2 heads on 2 ranks: weights or a mask of one rank's share would be 256 MB in fp32."""
    case = PROBLEMS[problem]
    lengths = {"lengths": (8000,), "kv_lengths": case.kv_lengths and (7000,)}
    for algorithm in ("direct", "ulysses"):
        for grown in workers.run(2, most_memory, replace(case, **lengths).on(2, algorithm)):
            assert grown < 64 * 2**20
