"""Which links are measured when: pairs of ranks that share nothing, at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAX_NODE_ROUNDS = 7  # of pairs of nodes: all pairs of 8 nodes; of more nodes, each meets 7


@dataclass(frozen=True)
class LinkSlot:
    """Pairs of ranks whose links are measured at the same time.

    Attributes:
        kind: "in_node" or "network".
        pairs: (rank, rank); no rank is in two pairs.
    """

    kind: str
    pairs: tuple[tuple[int, int], ...]


def tournament(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs of range(count) in which every pair occurs once (the circle method)."""
    players = list(range(count)) + [-1] * (count % 2)
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0]
        players = [players[0], players[-1], *players[1:-1]]


def link_slots(nodes: int, ranks_per_node: int) -> list[LinkSlot]:
    """Return the slots of all links.

    Inside nodes every pair of ranks is measured, one pair of each node at a time. Between nodes every rank is measured
    with the rank of its own local number on every other node, or on some of more than 8 nodes, one NIC of a node at a
    time; nodes meet in disjoint pairs.
    """
    slots = []
    for pairs in tournament(ranks_per_node):
        for a, b in pairs:
            bases = [node * ranks_per_node for node in range(nodes)]
            slots.append(LinkSlot("in_node", tuple((base + a, base + b) for base in bases)))
    for number, node_pairs in enumerate(tournament(nodes)):
        if number == MAX_NODE_ROUNDS:
            break
        for local in range(ranks_per_node):
            pairs_of_ranks = [(a * ranks_per_node + local, b * ranks_per_node + local) for a, b in node_pairs]
            slots.append(LinkSlot("network", tuple(pairs_of_ranks)))
    return slots
