"""The ranks of this machine, and the cores that they have."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_cp.engine.agreement import digest64


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of one machine.

    Attributes:
        ranks: their numbers among all ranks, consecutive.
        cores_per_rank: cores that a rank may use, divided by the ranks of the machine; the least of them.
    """

    ranks: tuple[int, ...]
    cores_per_rank: float


def gather_node_ranks(rank: int, local_rank: int, local_size: int, size: int, cores: int) -> NodeRanks | None:
    """Return the ranks of this machine; a collective of all ranks.

    Args:
        rank, size: this rank, and the number of all ranks.
        local_rank, local_size: this rank among those of its machine, and their number, as the launcher says.
        cores: cores that this process may use.

    Returns:
        None where the launcher does not number the ranks of a machine one after the other.
    """
    machine = digest64(socket.gethostname())
    own = torch.tensor([rank - local_rank, local_size, cores, machine], dtype=torch.int64)
    table = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(table, own)
    return node_ranks([row.tolist() for row in table], rank)


def node_ranks(table: list[list[int]], rank: int) -> NodeRanks | None:
    """Return the ranks of a rank's machine; None where the ranks contradict each other.

    Args:
        table: for each rank the first rank of its machine, the number of ranks there, its cores, and a number of the
            machine.
        rank: a rank.
    """
    first, local_size, _, machine = table[rank]
    ranks = range(first, min(first + local_size, len(table)))
    if first < 0 or rank not in ranks:
        return None
    if any((table[other][:2], table[other][3]) != ([first, local_size], machine) for other in ranks):
        return None
    return NodeRanks(tuple(ranks), min(table[other][2] for other in ranks) / len(ranks))
