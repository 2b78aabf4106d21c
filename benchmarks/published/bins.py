"""Bins of documents, each with a ring over a group of any number of ranks: the problem of DHP, arXiv 2602.21788.

First documents are packed into bins by best fit, longest first; a bin has the fewest ranks that have room for it. Then
ranks are assigned so that the slowest bin is done soonest, by dynamic programming over bins and ranks::

    least[bin, ranks] = min over d of max(least[bin - 1, ranks - d], seconds[bin, d])
"""

from __future__ import annotations

import numpy as np

from benchmarks.published.rings import Group
from mindspeed_cp import AttentionConfig
from mindspeed_cp.cluster import Cluster, ComputeCost
from mindspeed_cp.cluster.compute import ATTENTION_BACKWARD, LINEAR_BACKWARD
from mindspeed_cp.plan.pairs import visible_pairs
from mindspeed_cp.plan.transfers import GRADIENT_BYTES

BYTES = 2  # of an element of keys and values


def packed_bins(sizes: np.ndarray, room: float) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents, largest first, each into the fullest bin that has room for it, else into a new bin of the fewest
    ranks that have.

    Args:
        sizes: of the documents, fp64 [documents].
        room: of a rank.

    Returns:
        Bin of each document, int64 [documents], and ranks that each bin needs, int64 [bins].
    """
    bin_of = np.zeros(len(sizes), np.int64)
    left: list[float] = []
    needs: list[int] = []
    for doc in np.argsort(-sizes, kind="stable").tolist():
        size = float(sizes[doc])
        fits = [number for number, rest in enumerate(left) if rest >= size]
        if fits:
            number = min(fits, key=left.__getitem__)
        else:
            number = len(left)
            needs.append(max(1, int(np.ceil(size / room))))
            left.append(needs[-1] * room)
        left[number] -= size
        bin_of[doc] = number
    return bin_of, np.array(needs, np.int64)


def ring_seconds(
    lengths: np.ndarray, bin_of: np.ndarray, bins: int, ranks: int, attention: AttentionConfig, cluster: Cluster
) -> np.ndarray:
    """Return the seconds of one layer of each bin on rings of 1 to `ranks` ranks, forward and backward: attention or
    the transfers of keys and gradients, whichever take longer, and linear layers, fp64 [bins, ranks].

    Args:
        lengths: of the documents, int64 [documents].
        bin_of: bin of each document, int64 [documents].
        bins: number of bins.
        ranks: most ranks of a ring.
        attention: of the layer, with a causal mask.
        cluster: its speeds; a ring of more ranks than a node has crosses nodes over one NIC.
    """
    cost, degree = ComputeCost(cluster, attention), np.arange(1, ranks + 1)
    pairs = visible_pairs(lengths, lengths, attention)
    tokens = np.bincount(bin_of, lengths, bins)[:, None] / degree
    shorter = np.where(degree == 1, lengths[:, None], lengths[:, None] / (2 * degree))  # chunks of a zig-zag
    attention_seconds = np.zeros((bins, ranks))
    np.add.at(attention_seconds, bin_of, cost.attention_seconds(pairs[:, None], shorter) / degree)
    inside = cluster.effective_pair if cluster.fabric == "mesh" else cluster.effective_rank
    rate = np.where(degree > cluster.ranks_per_node, min(inside, cluster.effective_nic), inside)
    row = attention.kv_heads * (attention.head_dim + attention.head_dim_v)
    hops = tokens * row * (degree - 1) / rate
    forward = np.maximum(attention_seconds, hops * BYTES)
    backward = np.maximum(attention_seconds * ATTENTION_BACKWARD, hops * (BYTES + GRADIENT_BYTES))
    linear = cost.linear_layer_seconds(tokens) * (1 + LINEAR_BACKWARD)
    return np.asarray(forward + backward + linear)


def assigned_ranks(seconds: np.ndarray, needs: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Assign ranks to bins so that the slowest is done soonest.

    Args:
        seconds: of each bin on 1, 2, ... ranks, fp64 [bins, ranks].
        needs: fewest ranks of each bin, int64 [bins].

    Returns:
        Ranks of each bin, int64 [bins], and the seconds of the slowest; None if there are too few ranks.
    """
    bins, ranks = seconds.shape
    least = np.zeros(ranks + 1)  # of the bins so far, on so many ranks at most
    taken = np.zeros((bins, ranks + 1), np.int64)
    for number in range(bins):
        after = np.full((ranks + 1, ranks + 1), np.inf)  # [ranks at most, of these for this bin]
        for degree in range(int(needs[number]), ranks + 1):
            after[degree:, degree] = np.maximum(least[: ranks + 1 - degree], seconds[number, degree - 1])
        taken[number] = after.argmin(1)
        least = after.min(1)
    if not np.isfinite(least[ranks]):
        return None
    out, left = np.zeros(bins, np.int64), ranks
    for number in reversed(range(bins)):
        out[number] = taken[number, left]
        left -= out[number]
    return out, float(least[ranks])


def seated(counts: np.ndarray, nodes: int, per_node: int) -> list[Group]:
    """Give groups of so many ranks their ranks: largest first, each in the fullest node that has room for it, else over
    the emptiest nodes.

    Args:
        counts: ranks of each group, int64 [groups]; no more together than there are.
        nodes, per_node: the ranks, numbered node by node.
    """
    free = [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]
    groups: list[Group] = [()] * len(counts)
    for number in np.argsort(-counts, kind="stable").tolist():
        count, chosen = int(counts[number]), []
        while count:
            room = [ranks for ranks in free if len(ranks) >= count]
            node = min(room, key=len) if room else max(free, key=len)
            seats = node[:count]
            del node[:count]
            chosen += seats
            count -= len(seats)
        groups[number] = tuple(sorted(chosen))
    return groups
