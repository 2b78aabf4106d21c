"""The in-memory transport: when messages are copied, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch

from mindspeed_cp.comm.group_transport import Transfer
from mindspeed_cp.comm.in_memory import InMemoryNetwork
from mindspeed_cp.engine.all_ranks import run_all_ranks
from mindspeed_cp.errors import PeerError


def posted(network, sent, received, tag=0):
    """Rank 0 sends a tensor to rank 1."""
    [send] = network.transport(0).post([Transfer(sent, 1, True, 5, "K and V, step 3")])
    [receive] = network.transport(1).post([Transfer(received, 0, False, 5 + tag, "K and V, step 3")])
    return send, receive


@pytest.mark.parametrize(("lazy", "seen"), [(False, 1.0), (True, 2.0)])
def test_a_buffer_that_is_written_too_early_shows(lazy, seen):
    network, sent, received = InMemoryNetwork(2, lazy), torch.ones(3), torch.zeros(3)
    send, receive = posted(network, sent, received)
    sent.fill_(2.0)
    receive.wait()
    send.wait()
    assert received.tolist() == [seen] * 3
    network.check_empty()


def test_a_buffer_that_is_read_too_early_is_nan():
    network, received = InMemoryNetwork(2, lazy=True), torch.zeros(3)
    _, receive = posted(network, torch.ones(3), received)
    assert received.isnan().all()
    receive.wait()
    assert received.tolist() == [1.0] * 3


def test_tags_and_the_order_of_posting_match_messages():
    network, received = InMemoryNetwork(2), [torch.zeros(1) for _ in range(3)]
    tags = (4, 7, 4)
    for tag, value in zip(tags, (1.0, 2.0, 3.0), strict=True):
        network.transport(0).post([Transfer(torch.full((1,), value), 1, True, tag, "")])
    network.transport(1).post([Transfer(x, 0, False, tag, "") for x, tag in zip(received, (7, 4, 4), strict=True)])
    assert [float(x) for x in received] == [2.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (torch.zeros(4), r"rank 1: receiving from rank 0, K and V, step 3 ([4] torch.float32, tag 5); rank 0: sending"),
        (torch.zeros(3, dtype=torch.float64), "([3] torch.float64, tag 5)"),
        (torch.zeros(3, 2).T[0], "the tensor is not contiguous"),
    ],
)
def test_ends_that_do_not_fit_are_refused(other, says):
    with pytest.raises(PeerError, match=re.escape(says)):
        posted(InMemoryNetwork(2), torch.ones(3), other)


def test_messages_left_over_are_named():
    network = InMemoryNetwork(2)
    send, _ = posted(network, torch.ones(3), torch.zeros(3), tag=1)
    with pytest.raises(PeerError, match="the other end is not posted"):
        send.wait()
    with pytest.raises(PeerError, match=r"left over: rank 0: sending to rank 1, .*, tag 5\), the other end .* tag 6\)"):
        network.check_empty()
    network = InMemoryNetwork(2)
    send, _ = posted(network, torch.ones(3), torch.zeros(3))
    send.wait()
    with pytest.raises(PeerError, match=r"left over: rank 1: .*, no rank waits for it"):
        network.check_empty()


def exchange(network, rank, tags):
    """A rank that sends to the other one and receives from it, over and over; returns what it received."""
    results = []
    for tag in tags:
        received = torch.zeros(1)
        pending = network.transport(rank).post(
            [
                Transfer(torch.full((1,), 10.0 * rank + tag), 1 - rank, True, tag, "block"),
                Transfer(received, 1 - rank, False, tag, "block"),
            ]
        )
        yield pending
        for transfer in pending:
            transfer.wait()
        results.append(float(received))
    return results


def test_ranks_go_on_when_what_they_wait_for_is_there():
    network = InMemoryNetwork(2)
    runs = [exchange(network, 0, (1, 2, 3)), exchange(network, 1, (1, 2, 3))]
    assert run_all_ranks(runs, network) == [[11.0, 12.0, 13.0], [1.0, 2.0, 3.0]]


def test_a_dead_lock_names_who_waits_for_what():
    network = InMemoryNetwork(2)
    runs = [exchange(network, 0, (1, 2)), exchange(network, 1, (1, 3))]
    with pytest.raises(PeerError) as caught:
        run_all_ranks(runs, network)
    text = str(caught.value)
    assert text.startswith("dead-lock: rank 0: sending to rank 1, block ([1] torch.float32, tag 2) waits for the other")
    assert "rank 1: receiving from rank 0, block ([1] torch.float32, tag 3) waits for the other end" in text


def test_a_rank_that_ends_early_leaves_the_other_waiting():
    network = InMemoryNetwork(2)
    with pytest.raises(PeerError, match="dead-lock: rank 0: sending to rank 1"):
        run_all_ranks([exchange(network, 0, (1, 2)), exchange(network, 1, (1,))], network)
