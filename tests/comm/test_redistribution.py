"""Moves between layouts on real processes: rows and heads arrive where they belong, and gradients go back the same way."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from mindspeed_cp.comm import Transport, move_of, start_moves
from mindspeed_cp.layout import Documents, Redistribution, contiguous, zigzag
from mindspeed_cp.plan.verify.buffers import held_apart
from tests.engine.meters import Meter

HEADS = 5
CPU = torch.device("cpu")

#: Bytes of a row and head of the two tensors that are moved: three of fp32, two of bf16.
WIDTH = 3 * 4 + 2 * 2


def layout(ranks, rng, replicated):
    """Some layout of 4 documents: zig-zag or contiguous, all heads, a range each, or ranges that overlap."""
    documents = Documents([37, 0, 5, 21])
    if rng.random() < 0.5:
        return rng.choice((zigzag, contiguous))(documents, ranks)
    held = rng.choice((zigzag, contiguous))(documents, 1)
    spans = np.repeat(held.spans, ranks)
    spans["rank"] = np.tile(np.arange(ranks), len(held.spans))
    edges = np.arange(ranks + 1) * HEADS // ranks
    heads = np.stack([edges[:-1], edges[1:]], 1)
    if replicated:
        heads[:, 1] = np.minimum(heads[:, 1] + 1, HEADS)
    return type(held)(documents, ranks, spans[np.argsort(spans["rank"], kind="stable")]).with_heads(heads)


def pair(ranks, seed):
    """Layouts to move between; they differ."""
    rng = Random(seed)
    while True:
        source, target = zigzag(Documents([37, 0, 5, 21]), ranks), layout(ranks, rng, replicated=seed % 2 == 0)
        redistribution = Redistribution.between(source, target, HEADS)
        if redistribution is not None:
            return redistribution


def there_and_back(rank, group, seeds):
    """What a rank has after each move, and after its adjoint, of two tensors of other widths and types at once."""
    transport = Transport(group, 30)
    found = []
    for seed in seeds:
        redistribution = pair(torch.distributed.get_world_size(group), seed)
        a, b = whole(seed)
        move, back = move_of(redistribution, rank, CPU), move_of(redistribution, rank, CPU, adjoint=True)
        held = [redistribution.source.shard(x, rank) for x in (a, b)]
        with Meter() as forward:
            moved = start_moves([(x, move) for x in held], transport, "test")()
        with Meter() as backward:
            returned = start_moves([(x, back) for x in moved], transport, "test")()
        found.append((moved, returned, forward.peak["staging"], backward.peak["staging"]))
    return found


def whole(seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-9, 9, (63, HEADS, 3), generator=generator).float()
    return a, torch.randint(-9, 9, (63, HEADS, 2), generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_rows_and_heads_arrive_and_copies_are_summed_on_the_way_back(workers, ranks):
    """Whole numbers: sums are exact. The adjoint gives each (token, head) as often as it was copied. What is held apart
    meanwhile is what `peak_bytes` counts."""
    seeds = list(range(2, 14))
    results = workers.run(ranks, there_and_back, seeds)
    copied = 0
    for i, seed in enumerate(seeds):
        redistribution = pair(ranks, seed)
        ranges = [redistribution.target.head_range(rank, HEADS) for rank in range(ranks)]
        times = torch.zeros(63, HEADS, 1)
        for rank, (first, last) in enumerate(ranges):
            times[redistribution.target.tokens(rank), first:last] += 1
        assert times.min() >= 1
        copied += int(times.max() > 1)
        assert redistribution.replicates == bool(times.max() > 1)
        for rank in range(ranks):
            moved, returned, *staging = results[rank][i]
            kept = redistribution.kept(rank)
            gathered = 0 if kept is None else int(kept["rows"] * kept["heads"]) * WIDTH
            for measured, back in zip(staging, (False, True), strict=True):
                stated = int(held_apart(redistribution, back)[rank]) * WIDTH
                assert measured <= stated <= measured + gathered
            for j, x in enumerate(whole(seed)):
                assert torch.equal(moved[j], redistribution.target.shard(x, rank))
                assert torch.equal(returned[j], redistribution.source.shard((x * times).to(x.dtype), rank))
    assert copied, "some moves copy heads"


def staged(rank, group, target_of):
    """Bytes of the result and of staging of a move from contiguous rows."""
    documents = Documents([40, 24])
    redistribution = Redistribution.between(contiguous(documents, 2), target_of(documents, 2), HEADS)
    x = redistribution.source.shard(torch.randn(64, HEADS, 3), rank)
    with Meter() as meter:
        start_moves([(x, move_of(redistribution, rank, CPU))], Transport(group, 30), "test")()
    return x.nbytes, meter.peak["moved"], meter.peak["staging"]


def swapped(documents, ranks):
    """Rank 0 has the rows of rank 1, and the other way round."""
    held = contiguous(documents, ranks)
    spans = held.spans.copy()
    spans["rank"] = 1 - spans["rank"]
    return type(held)(documents, ranks, spans[np.argsort(spans["rank"], kind="stable")])


def test_whole_runs_of_rows_are_sent_and_received_in_place(workers):
    for size, moved, staging in workers.run(2, staged, swapped):
        assert (moved, staging) == (size, 0)


def test_a_move_of_one_rank_needs_no_transport():
    held = contiguous(Documents([7, 4]), 1)
    x = torch.randn(11, HEADS, 3)
    [found] = start_moves([(x, move_of(Redistribution(held, held, HEADS), 0, CPU))], None, "test")()
    assert torch.equal(found, x)
