"""Edges that no warm-up knew: their communicators are made in a step, for which both ends wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest
import torch

from mindspeed_cp.comm.directional_groups import open_directional_groups
from mindspeed_cp.comm.group_transport import GroupTransport, Transfer
from tests.limits import HANG
from tests.npu import ranks

#: rank -> whom it sends to: a circle in one directional group after another, as a window over packed documents may ask of a ring.
RINGS = {3: [1, 2, 0], 4: [2, 3, 0, 1]}
SYNCHRONOUS = {"HOST_HCCL_SYNC": "1"}
HANGS = {**SYNCHRONOUS, "HOST_HCCL_TIMEOUT": "", "HCCL_CONNECT_TIMEOUT": "4"}


def turn(rank: int, size: int, in_turn: bool) -> float:
    """K and V go once round, without a warm-up; each rank posts what it sends first.

    Where they wait in a circle, the end of one that gives up ends the others.
    """
    if not in_turn:
        threading.Thread(target=end_after, args=((rank + 1) % size,), daemon=True).start()
    device = torch.device("npu", rank)
    open_directional_groups(None, device)
    transport = GroupTransport(None, HANG, device)
    if not in_turn:
        transport._connection_order = lambda transfers: list(range(len(transfers)))  # type: ignore[method-assign]
    target, source = RINGS[size][rank], RINGS[size].index(rank)
    sent = [torch.full((8,), float(10 * rank + i), device=device) for i in range(2)]
    came = [torch.empty(8, device=device) for _ in range(2)]

    def both(tensors: Sequence[torch.Tensor], peer: int, sends: bool) -> list[Transfer]:
        return [Transfer(x, peer, sends, i, "block") for i, x in enumerate(tensors)]

    pending = transport.post([*both(sent, target, True), *both(came, source, False)])
    assert len(pending) == 4
    for work in reversed(pending):
        work.wait()
    assert [x.cpu().unique().tolist() for x in came] == [[10.0 * source], [10.0 * source + 1]]
    return float(source)


def end_after(rank: int) -> None:
    """End this process after that of another rank."""
    ranks.wait_for_end(rank)
    os._exit(1)


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_go_through_new_edges_in_one_order(size: int) -> None:
    ranks.run(size, turn, True, environment=SYNCHRONOUS)


def test_in_the_order_of_the_plan_they_would_wait_in_a_circle() -> None:
    """What the order is for: each waits for the rank that it sends to, which waits for the next."""
    errors = ranks.start(3, turn, False, environment=HANGS).errors
    assert None not in errors and any("did not join within 4 s" in str(error) for error in errors), errors
