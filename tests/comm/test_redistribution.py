"""Moves between layouts: rows and heads arrive where they belong, and gradients go back the same way."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from mindspeed_cp.comm.group_transport import GroupTransport
from mindspeed_cp.comm.in_memory import InMemoryNetwork, InMemoryTransport
from mindspeed_cp.comm.redistribution import rank_redistribution, start_redistributions
from mindspeed_cp.layout import Documents, Redistribution, contiguous, zigzag
from mindspeed_cp.layout import redistribution as layout_redistribution
from mindspeed_cp.layout.redistribution import PACKED_BYTES, packed_pairs
from mindspeed_cp.plan.verify.memory import staging_volume
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


def limit_messages(monkeypatch, most):
    """Several tensors are one message if they have at most so many bytes."""
    monkeypatch.setattr(layout_redistribution, "PACKED_BYTES", most)


def in_memory(ranks):
    network = InMemoryNetwork(ranks, lazy=ranks % 2 == 0)
    return [network.transport(rank) for rank in range(ranks)]


def on_gloo(rank, group, seed, most):
    """What a rank has after a move, and after its adjoint."""
    with pytest.MonkeyPatch.context() as patch:
        limit_messages(patch, most)
        return moved_on_gloo(rank, group, seed)


def moved_on_gloo(rank, group, seed):
    redistribution, transport = pair(torch.distributed.get_world_size(group), seed), GroupTransport(group, 30)
    there, back = (rank_redistribution(redistribution, rank, CPU, adjoint=adjoint) for adjoint in (False, True))
    held = [redistribution.source.shard(x, rank) for x in whole(seed)]
    out = start_redistributions([(x, there) for x in held], transport, "test").finish()
    return out, start_redistributions([(x, back) for x in out], transport, "test").finish()


def whole(seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-9, 9, (63, HEADS, 3), generator=generator).float()
    return a, torch.randint(-9, 9, (63, HEADS, 2), generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("together", ["always", "if small", "never"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_rows_and_heads_arrive_and_copies_are_summed_on_the_way_back(ranks, together, monkeypatch):
    """Whole numbers: sums are exact. The adjoint gives each (token, head) as often as it was copied. What is held apart
    meanwhile is what `peak_bytes` counts. Both tensors travel as one message, or only if it is small, or never."""
    copied, packed = 0, set()
    for seed in range(2, 14):
        redistribution, tensors = pair(ranks, seed), whole(seed)
        pairs = redistribution.remote_pairs
        median = int(np.median(pairs["rows"] * pairs["heads"])) * WIDTH
        limit_messages(monkeypatch, {"always": PACKED_BYTES, "if small": median, "never": 0}[together])
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
                in_one = packed_pairs([(redistribution, WIDTH, len(tensors))])[0]
                packed |= set(in_one.tolist())
                stated = int(staging_volume(redistribution, adjoint, packed=in_one)[rank]) * WIDTH
                assert meters[rank].peak["staging"] <= stated <= meters[rank].peak["staging"] + gathered
                for actual, x in zip(held[rank], tensors, strict=True):
                    assert torch.equal(actual, layout.shard((x * times).to(x.dtype) if adjoint else x, rank))
    assert copied, "some moves copy heads"
    assert packed == {"always": {True}, "if small": {False, True}, "never": {False}}[together]


def test_what_goes_to_a_peer_is_one_message_of_several_types(monkeypatch):
    """Of fp32 and bf16 together, in bytes; apart, if there are more than PACKED_BYTES."""
    redistribution, posted = pair(3, 2), []
    post = InMemoryTransport.post
    monkeypatch.setattr(
        InMemoryTransport,
        "post",
        lambda self, transfers, **more: posted.append(transfers) or post(self, transfers, **more),
    )
    held = [redistribution.source.shard(x, 0) for x in whole(2)]
    part = rank_redistribution(redistribution, 0, CPU)
    rows = sum(1 for pair in redistribution.remote_pairs for rank in (pair["src"], pair["dst"]) if rank == 0)
    for most, count, types in ((PACKED_BYTES, rows, {torch.uint8}), (0, 2 * rows, {torch.float32, torch.bfloat16})):
        limit_messages(monkeypatch, most)
        start_redistributions([(x, part) for x in held], in_memory(3)[0], "test")
        sent = posted.pop()
        assert len(sent) == len({(t.peer, t.sends, t.tag) for t in sent}) == count
        assert {t.tensor.dtype for t in sent} == types
    start_redistributions([(held[0], part)] * 2, in_memory(3)[0], "test")
    assert {t.tensor.dtype for t in posted.pop()} == {torch.float32}


@pytest.mark.parametrize("most", [0, 200, PACKED_BYTES], ids="in one message: {}".format)
@pytest.mark.parametrize("ranks", [3, 4])
def test_a_process_group_moves_the_same(workers, ranks, most):
    for seed in (2, 3):
        redistribution, tensors = pair(ranks, seed), whole(seed)
        held = [[redistribution.source.shard(x, rank) for x in tensors] for rank in range(ranks)]
        results = workers.run(ranks, on_gloo, seed, most)
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
