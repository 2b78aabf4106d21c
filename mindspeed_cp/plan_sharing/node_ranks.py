"""The ranks of this machine, and the cores that they have, by what each rank tells the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_cp.engine.agreement import digest64


@dataclass(frozen=True)
class NodeRanks:
    """Ranks of one machine.

    Attributes:
        ranks: their numbers among all ranks, ascending.
        cores_per_rank: cores that a rank may use, divided by all ranks of the machine; the least of these ranks.
    """

    ranks: tuple[int, ...]
    cores_per_rank: float


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_row(rank: int, local_rank: int, local_size: int, cores: int) -> list[int]:
    """Return what a rank tells the others, for :func:`node_ranks`.

    Args:
        rank: its number among all ranks.
        local_rank, local_size: its number among those of its machine, and how many these are, as the launcher says.
        cores: cores that its process may use.
    """
    return [rank - local_rank, local_size, cores, digest64(socket.gethostname())]


def node_ranks(table: Mapping[int, Sequence[int]], rank: int, size: int) -> NodeRanks | None:
    """Return the ranks of a rank's machine; None where the ranks contradict each other.

    Args:
        table: result of :func:`rank_row` for each rank that may share plans with this one, and for itself: the first
            rank of its machine, the number of ranks there, its cores, and a number of the machine.
        rank: a rank.
        size: number of all ranks.
    """
    first, local_size, _, machine = table[rank]
    on_machine = range(first, min(first + local_size, size))
    if first < 0 or rank not in on_machine:
        return None
    ranks = tuple(other for other in on_machine if other in table)
    if any((*table[other][:2], table[other][3]) != (first, local_size, machine) for other in ranks):
        return None
    return NodeRanks(ranks, min(table[other][2] for other in ranks) / len(on_machine))
