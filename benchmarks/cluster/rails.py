"""One message between two nodes: over the sender's own NIC, and routed over all NICs of both nodes.

Rank numbers, four ranks in a node; the message goes from 3 to 4::

    direct      3 --------------------------------> 4

    routed      3 -- in node -> 0 -- NIC --> 5 -- in node -> 4
                3 -- in node -> 1 -- NIC --> 6 -- in node -> 4
                3 -- in node -> 2 -- NIC --> 7 -- in node -> 4
                3 -------------- NIC ----------------------> 4

Pipelined: each part travels in pieces, so that a relay sends one while it receives the next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

PIECES = 4


def direct(rank: int, per_node: int, data: Tensor) -> None:
    """Send the whole message over one NIC.

    Args:
        rank: this one.
        per_node: ranks of a node; rank per_node - 1 sends, rank per_node receives.
        data: [elements], sent or written.
    """
    if rank == per_node - 1:
        dist.send(data, per_node)
    elif rank == per_node:
        dist.recv(data, per_node - 1)


def routed(rank: int, per_node: int, data: Tensor, pieces: int = 1) -> None:
    """Send a part over each NIC of the two nodes; arguments as of :func:`direct`.

    Args:
        pieces: of a part, that travel one after the other.
    """
    source, target = per_node - 1, per_node
    parts = [part.chunk(pieces) for part in data.chunk(per_node)]
    first_hop = [*range(per_node - 1), source]  # who takes part i to the other node
    second_hop = [*range(target + 1, target + per_node), target]  # and who takes it there
    works: list[Any] = []
    if rank == source:
        works = [dist.isend(parts[i][p], _next(rank, i, first_hop, second_hop)) for p, i in _order(pieces, per_node)]
    elif rank == target:
        works = [dist.irecv(parts[i][p], _before(rank, i, first_hop, second_hop)) for p, i in _order(pieces, per_node)]
    elif rank in first_hop or rank in second_hop:
        i = (first_hop if rank in first_hop else second_hop).index(rank)
        by, to = _before(rank, i, first_hop, second_hop, source), _next(rank, i, first_hop, second_hop, target)
        arriving = [dist.irecv(piece, by) for piece in parts[i]]
        for piece, work in zip(parts[i], arriving, strict=True):
            assert work is not None
            work.wait()
            works.append(dist.isend(piece, to))
    for work in works:
        work.wait()


def _order(pieces: int, parts: int) -> list[tuple[int, int]]:
    """Return (piece, part): the first piece of every part, then the second."""
    return [(p, i) for p in range(pieces) for i in range(parts)]


def _next(rank: int, part: int, first: list[int], second: list[int], end: int | None = None) -> int:
    """Return the rank to which a rank sends its piece of a part."""
    if rank == first[part]:
        return second[part]
    return first[part] if end is None else end


def _before(rank: int, part: int, first: list[int], second: list[int], begin: int | None = None) -> int:
    """Return the rank from which a rank gets its piece of a part."""
    if rank == second[part]:
        return first[part]
    return second[part] if begin is None else begin


MESSAGES: dict[str, Callable[[int, int, Tensor], None]] = {
    "one NIC": direct,
    "all NICs": routed,
    f"all NICs, {PIECES} pieces": partial(routed, pieces=PIECES),
}
