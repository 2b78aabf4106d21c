"""Moves between layouts: rows and heads arrive where they belong, and gradients go back the same way."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from mindspeed_cp.comm import GroupTransport, InMemoryNetwork, rank_redistribution, start_redistributions
from mindspeed_cp.layout import Documents, Redistribution, contiguous, zigzag
from mindspeed_cp.plan.verify.buffers import staging_volume
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


def moved(inputs, parts, meters, transports):
    """Every rank's tensors after their redistributions: all are posted, then all are finished."""
    under_way = []
    for rank, (held, part) in enumerate(zip(inputs, parts, strict=True)):
        with meters[rank]:
            under_way.append(start_redistributions([(x, part) for x in held], transports[rank], "test"))
    results = []
    for rank, flight in enumerate(under_way):
        with meters[rank]:
            results.append(flight.finish())
    return results


def in_memory(ranks):
    network = InMemoryNetwork(ranks, lazy=ranks % 2 == 0)
    return [network.transport(rank) for rank in range(ranks)]


def on_gloo(rank, group, seed):
    """What a rank has after a move, and after its adjoint."""
    redistribution, transport = pair(torch.distributed.get_world_size(group), seed), GroupTransport(group, 30)
    there, back = (rank_redistribution(redistribution, rank, CPU, adjoint=adjoint) for adjoint in (False, True))
    held = [redistribution.source.shard(x, rank) for x in whole(seed)]
    out = start_redistributions([(x, there) for x in held], transport, "test").finish()
    return out, start_redistributions([(x, back) for x in out], transport, "test").finish()


def whole(seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-9, 9, (63, HEADS, 3), generator=generator).float()
    return a, torch.randint(-9, 9, (63, HEADS, 2), generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_rows_and_heads_arrive_and_copies_are_summed_on_the_way_back(ranks):
    """Whole numbers: sums are exact. The adjoint gives each (token, head) as often as it was copied. What is held apart
    meanwhile is what `peak_bytes` counts."""
    copied = 0
    for seed in range(2, 14):
        redistribution, tensors = pair(ranks, seed), whole(seed)
        times = torch.zeros(63, HEADS, 1)
        for rank in range(ranks):
            first, last = redistribution.target.head_range(rank, HEADS)
            times[redistribution.target.tokens(rank), first:last] += 1
        assert times.min() >= 1
        copied += int(times.max() > 1)
        assert redistribution.has_copies == bool(times.max() > 1)
        held = [[redistribution.source.shard(x, rank) for x in tensors] for rank in range(ranks)]
        for adjoint in (False, True):
            meters = [Meter() for _ in range(ranks)]
            parts = [rank_redistribution(redistribution, rank, CPU, adjoint=adjoint) for rank in range(ranks)]
            held = moved(held, parts, meters, in_memory(ranks))
            layout = redistribution.source if adjoint else redistribution.target
            for rank in range(ranks):
                kept = redistribution.local_pair(rank)
                gathered = 0 if kept is None else int(kept["rows"] * kept["heads"]) * WIDTH
                stated = int(staging_volume(redistribution, adjoint)[rank]) * WIDTH
                assert meters[rank].peak["staging"] <= stated <= meters[rank].peak["staging"] + gathered
                for actual, x in zip(held[rank], tensors, strict=True):
                    assert torch.equal(actual, layout.shard((x * times).to(x.dtype) if adjoint else x, rank))
    assert copied, "some moves copy heads"


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_process_group_moves_the_same(workers, ranks):
    for seed in (2, 3):
        redistribution, tensors = pair(ranks, seed), whole(seed)
        held = [[redistribution.source.shard(x, rank) for x in tensors] for rank in range(ranks)]
        results = workers.run(ranks, on_gloo, seed)
        for direction, adjoint in enumerate((False, True)):
            parts = [rank_redistribution(redistribution, rank, CPU, adjoint=adjoint) for rank in range(ranks)]
            held = moved(held, parts, [Meter() for _ in range(ranks)], in_memory(ranks))
            for rank in range(ranks):
                assert all(torch.equal(a, b) for a, b in zip(held[rank], results[rank][direction], strict=True))


def swapped(documents, ranks):
    """Rank 0 has the rows of rank 1, and the other way round."""
    held = contiguous(documents, ranks)
    spans = held.spans.copy()
    spans["rank"] = 1 - spans["rank"]
    return type(held)(documents, ranks, spans[np.argsort(spans["rank"], kind="stable")])


def test_whole_runs_of_rows_are_sent_and_received_in_place():
    documents = Documents([40, 24])
    redistribution = Redistribution.between(contiguous(documents, 2), swapped(documents, 2), HEADS)
    whole_x, meters = torch.randn(64, HEADS, 3), [Meter(), Meter()]
    held = [[redistribution.source.shard(whole_x, rank)] for rank in range(2)]
    moved(held, [rank_redistribution(redistribution, rank, CPU) for rank in range(2)], meters, in_memory(2))
    for [x], meter in zip(held, meters, strict=True):
        assert (meter.peak["redistributed"], meter.peak["staging"]) == (x.nbytes, 0)


def test_a_move_of_one_rank_needs_no_transport():
    held = contiguous(Documents([7, 4]), 1)
    x = torch.randn(11, HEADS, 3)
    [pending] = start_redistributions(
        [(x, rank_redistribution(Redistribution(held, held, HEADS), 0, CPU))], None, "test"
    ).finish()
    assert torch.equal(pending, x)
