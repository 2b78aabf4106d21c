"""Transfers between real processes on gloo: rings of any size, and peers that die or do not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.distributed_c10d import _get_default_store

from mindspeed_cp.comm.group_transport import GroupTransport, Transfer, split_launches
from mindspeed_cp.errors import ConfigError, PeerError
from tests.limits import HANG
from tests.processes import RankError
from tests.workers import GlooPool


def ring(rank, group, size, rounds, rows):
    """Each round passes everybody's block on; returns what this rank holds in the end."""
    transport = GroupTransport(group, 30)
    held = [torch.full((rows, 2), float(rank)), torch.empty(rows, 2)]
    for step in range(rounds):
        sending, receiving = held[step % 2], held[(step + 1) % 2]
        pending = transport.post(
            [
                Transfer(sending, (rank + 1) % size, True, step, "block"),
                Transfer(receiving, (rank - 1) % size, False, step, "block"),
            ]
        )
        for transfer in pending:
            transfer.wait()
    return held[rounds % 2]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_rings_of_any_size_turn(workers, size):
    results = workers.run(size, ring, size, size + 1, 50_000)  # blocks far larger than any socket buffer
    for rank, block in enumerate(results):
        assert (block == (rank - size - 1) % size).all()


def exchange_with_tags(rank, group):
    transport = GroupTransport(group, 30)
    out, into = [torch.full((3,), 10.0 * rank + i) for i in range(4)], [torch.empty(3) for _ in range(4)]
    receives = [Transfer(into[i], 1 - rank, False, i, "") for i in (2, 0, 3, 1)]
    for pending in transport.post([*(Transfer(t, 1 - rank, True, i, "") for i, t in enumerate(out)), *receives]):
        pending.wait()
    return [float(t[0]) for t in into]


def test_tags_tell_transfers_of_one_pair_apart(workers):
    assert workers.run(2, exchange_with_tags) == [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]


def wait_for_silence(rank, group):
    store = _get_default_store()
    if rank:
        store.wait(["rank 0 gave up"], timedelta(seconds=HANG))
        return None
    transport = GroupTransport(group, 1.0)
    [pending] = transport.post([Transfer(torch.empty(4), 1, False, 7, "K and V, step 3, 4 rows")])
    try:
        pending.wait()
    except PeerError as error:
        return str(error)
    finally:
        store.set("rank 0 gave up", "")
    return None


def test_a_silent_peer_is_named_within_the_timeout():
    workers = GlooPool(2)  # of its own: a failed group cannot be used again
    try:
        text = workers.run(2, wait_for_silence)[0]
    finally:
        workers.close()
    assert "rank 0: receiving from rank 1 (global rank 1), K and V, step 3, 4 rows: no answer within 1 s" in text


def meet_a_dead_peer(rank, group):
    transport = GroupTransport(group, HANG)  # so that only the peer's death ends the wait
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(100):
        for pending in transport.post([Transfer(torch.empty(9), 1, False, step, "K and V, step 0, 9 rows")]):
            pending.wait()


def test_a_dead_peer_is_named_at_once():
    workers = GlooPool(2)
    with pytest.raises(RankError) as error:
        workers.run(2, meet_a_dead_peer)
    text = str(error.value)
    assert "rank 1: the process was killed by SIGKILL" in text
    assert "rank 0: receiving from rank 1 (global rank 1), K and V, step 0, 9 rows: the connection failed" in text


def test_gloo_is_found_however_the_group_was_made(tmp_path):
    """A group made without naming a backend serves several kinds of device, and says "undefined" when asked."""
    code = (
        "import torch.distributed as dist; from mindspeed_cp.comm.group_transport import GroupTransport\n"
        "for number, backend in enumerate(((), ('gloo',), ('cpu:gloo',))):\n"
        f"    store = f'file://{tmp_path}/store{{number}}'\n"
        "    dist.init_process_group(*backend, init_method=store, rank=0, world_size=1)\n"
        "    assert GroupTransport(None, 1.0).is_gloo is True\n"
        "    dist.destroy_process_group()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_timeout_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="timeout is 0 seconds; valid: more than 0"):
        GroupTransport(None, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1]), max_size=30))
def test_launches_have_a_peer_once_and_match_at_both_ends(messages):
    """Every rank posts its ends of the messages in one global order; the n-th launches of all ranks are for each other."""
    nothing = torch.empty(0)
    launches: dict[int, list[int]] = {}  # message -> numbers of the launches of its two ends
    for rank in range(4):
        own_messages = [(number, pair) for number, pair in enumerate(messages) if rank in pair]
        transfers = [
            Transfer(nothing, target if source == rank else source, source == rank, 0, "")
            for _, (source, target) in own_messages
        ]
        for turn, launch in enumerate(split_launches(transfers)):
            peers = [(transfers[i].peer, transfers[i].sends) for i in launch]
            assert launch and len(set(peers)) == len(peers)
            for i in launch:
                launches.setdefault(own_messages[i][0], []).append(turn)
    assert all(len(turns) == 2 and turns[0] == turns[1] for turns in launches.values()) and len(launches) == len(
        messages
    )


def test_what_is_due_first_is_launched_first() -> None:
    """Of two steps that wait, the second has the first two transfers; libraries without lists of pairs take all of a
    step in one launch."""
    nothing = torch.empty(0)
    transfers = [Transfer(nothing, peer, True, 0, "", due) for peer, due in ((1, 3), (2, 3), (1, 0), (1, 0), (3, 0))]
    assert split_launches(transfers, one_each=False) == [[2, 3, 4], [0, 1]]
    assert split_launches(transfers) == [[2, 4], [3], [0, 1]]
