"""Edges that no warm-up knew: their communicators are made in a step, for which both ends wait."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from mindspeed_cp.comm import Transfer, Transport, open_lanes
from tests.npu import ranks

#: rank -> whom it sends to: a circle on one lane after another, as a window over packed documents may ask of a ring.
RINGS = {3: [1, 2, 0], 4: [2, 3, 0, 1]}
SYNCHRONOUS = {"HOST_HCCL_SYNC": "1", "HOST_HCCL_TIMEOUT": "", "HCCL_CONNECT_TIMEOUT": "4", "HCCL_EXEC_TIMEOUT": "20"}


def turn(rank: int, size: int, in_turn: bool) -> float:
    """K and V go once round, without a warm-up; each rank posts what it sends first."""
    device = torch.device("npu", rank)
    open_lanes(None, device)
    transport = Transport(None, 30, device)
    if not in_turn:
        transport._in_turn = lambda transfers: list(range(len(transfers)))  # type: ignore[method-assign]
    target, source = RINGS[size][rank], RINGS[size].index(rank)
    sent = [torch.full((8,), float(10 * rank + i), device=device) for i in range(2)]
    came = [torch.empty(8, device=device) for _ in range(2)]

    def both(tensors: Sequence[torch.Tensor], peer: int, sends: bool) -> list[Transfer]:
        return [Transfer(x, peer, sends, i, "block") for i, x in enumerate(tensors)]

    pending = transport.post([*both(sent, target, True), *both(came, source, False)])
    assert len(pending) == 4
    for one in reversed(pending):
        one.wait()
    assert [x.cpu().unique().tolist() for x in came] == [[10.0 * source], [10.0 * source + 1]]
    return float(source)


@pytest.mark.parametrize("size", [3, 4])
def test_ranks_go_through_new_edges_in_one_order(size: int) -> None:
    ranks.run(size, turn, True, environment=SYNCHRONOUS)


def test_in_the_order_of_the_plan_they_would_wait_in_a_circle() -> None:
    """What the order is for: each waits for the rank that it sends to, which waits for the next."""
    done = ranks.start(3, turn, False, limit=8, environment=SYNCHRONOUS)
    for error in done.errors:  # of the library, or of the run for the rank that others still wait for
        assert error is not None
        assert re.search(r"rank \d did not join within 4 s|^no answer within 8 s", error), error
    assert any("did not join within 4 s" in (error or "") for error in done.errors)
