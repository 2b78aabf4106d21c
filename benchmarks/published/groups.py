"""Which ranks share each document, as the systems that choose it per document do."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from benchmarks.published.rings import Group


def power_of_two_groups(lengths: np.ndarray, ranks: int, most: int) -> list[Group]:
    """Return the groups of Megatron's dynamic context parallelism: a power of two of neighbouring ranks each.

    A document of s tokens takes the least power of two of ranks that leaves none with more than `most` of them, and
    costs each of these s * s / ranks. Documents go, longest first, to the aligned group of their size whose busiest
    rank has least to do.

    Args:
        lengths: of the documents, int64 [documents].
        ranks: how many there are; groups are no larger than the largest power of two among them.
        most: tokens of a document that a rank takes (`max_seqlen_per_dp_cp_rank`).
    """
    groups: list[Group] = [(0,)] * len(lengths)
    load = np.zeros(ranks)
    for doc in np.argsort(-lengths, kind="stable").tolist():
        size = power_of_two(int(lengths[doc]), ranks, most)
        starts = np.arange(0, ranks - size + 1, size)
        first = int(starts[np.argmin([load[start : start + size].max() for start in starts])])
        load[first : first + size] += float(lengths[doc]) ** 2 / size
        groups[doc] = tuple(range(first, first + size))
    return groups


def power_of_two(length: int, ranks: int, most: int) -> int:
    """Return the least power of two of ranks, of so many at most, that has room for a document, `most` tokens each."""
    size = 1
    while size * most < length and 2 * size <= ranks:
        size *= 2
    return size


@dataclass(frozen=True)
class Thresholds:
    """Where the zones of a hierarchical partition begin.

    Attributes:
        node: documents with more work than this part of a node's equal share cross nodes.
        rank: documents with more work than this part of a rank's equal share are cut inside a node.
    """

    node: float
    rank: float


def zoned_groups(
    of_node: np.ndarray, of_rank: np.ndarray, nodes: int, per_node: int, thresholds: Thresholds
) -> list[Group]:
    """Return the groups of Zeppelin's hierarchical partition: across nodes, inside a node, or on one rank.

    First nodes are filled, then the ranks of each, longest documents first. A document that crosses takes all ranks of
    the fewest nodes whose equal shares hold it, those with the least; others go to the node with the least. Inside a
    node a document takes the fewest ranks whose equal shares hold it, those with the least. Members of a group have
    equal shares.

    Args:
        of_node: what documents fill nodes with, in any unit, fp64 [documents].
        of_rank: what they fill ranks with, fp64 [documents].
        nodes, per_node: the ranks, numbered node by node.
        thresholds: lengths above which documents go to a node, or across nodes.
    """
    groups: list[Group] = [(0,)] * len(of_rank)
    fair_node = max(float(of_rank.sum()) / nodes, 1e-30)
    fair_rank = fair_node / per_node
    filled = [0.0] * nodes
    load = np.zeros((nodes, per_node))
    for doc in np.argsort(-of_rank, kind="stable").tolist():
        need = min(nodes, max(1, int(np.ceil(of_rank[doc] / fair_node / thresholds.node))))
        chosen = sorted(heapq.nsmallest(need, range(nodes), key=filled.__getitem__))
        for node in chosen:
            filled[node] += of_node[doc] / need
        if need > 1:
            load[chosen] += of_rank[doc] / need / per_node
            groups[doc] = tuple(node * per_node + rank for node in chosen for rank in range(per_node))
            continue
        node = chosen[0]
        count = min(per_node, max(1, int(np.ceil(of_rank[doc] / fair_rank / thresholds.rank))))
        ranks = sorted(np.argsort(load[node], kind="stable")[:count].tolist())
        load[node, ranks] += of_rank[doc] / count
        groups[doc] = tuple(node * per_node + rank for rank in ranks)
    return groups
