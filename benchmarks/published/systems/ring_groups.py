"""Systems that give each document to a group of ranks: with a ring in each group, or with keys that are fetched."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.published.rings import Group, RoutedLinkQueues, grouped_rings, routing_pays
from benchmarks.published.systems.even import Case
from benchmarks.published.timing import Candidate
from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.algorithms.hierarchical import plan_from_placement
from mindspeed_cp.algorithms.linear_layout import cheapest_mode, with_linear_layout
from mindspeed_cp.algorithms.placement.estimate import PlacementModel
from mindspeed_cp.algorithms.placement.policy import DocumentShares, Placement, PlacementPolicy
from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost
from mindspeed_cp.cluster.compute import ATTENTION_BACKWARD, LINEAR_BACKWARD
from mindspeed_cp.plan.problem import visible_pairs
from mindspeed_cp.plan.transfers import GRADIENT_BYTES

#: `max_seqlen_per_dp_cp_rank` of dynamic context parallelism: tokens of a document that a rank takes. All are tried.
MOST_TOKENS = (2048, 4096, 8192)

# Which ranks share each document, as the systems that choose it per document do.


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


# Bins of documents, each with a ring over a group of any number of ranks: the problem of DHP, arXiv 2602.21788.
#
# First documents are packed into bins by best fit, longest first; a bin has the fewest ranks that have room for it.
# Then ranks are assigned so that the slowest bin is done soonest, by dynamic programming over bins and ranks::
#
#     least[bin, ranks] = min over d of max(least[bin - 1, ranks - d], seconds[bin, d])


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


#: Of Zeppelin's zones; all are tried.
ZONES = tuple(
    Thresholds(*thresholds) for thresholds in ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5), (0.25, 0.5), (2.0, 1.0), (1.0, 2.0))
)

#: Room of a rank in DHP's bins, in shares of the mean; all are tried. So many of the best are simulated.
ROOM = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
SIMULATED = 2


def dynamic_cp(case: Case) -> list[Candidate]:
    """Build Megatron-core's dynamic (hybrid) context parallelism (its `BalancedCPScheduler`): every document on a power
    of two of neighbouring ranks by its length, balanced by s^2 / ranks. With TE's forwarding ring in each group, or
    with keys fetched from their owners; linear layers where attention is. Of several `max_seqlen_per_dp_cp_rank` the
    fastest. Assumed in its favour: groups run one after the other without the barriers of its schedule, and backwards
    after all forwards."""
    lengths, ranks = case.documents.lengths, case.topology.ranks
    candidates = []
    for most in MOST_TOKENS:
        candidates += _in_groups(case, f"dynamic CP <= {most}", power_of_two_groups(lengths, ranks, most))
    return candidates


def zeppelin(case: Case) -> list[Candidate]:
    """Build Zeppelin (arXiv 2509.21841): documents on one rank, in a ring inside a node, or in a ring across nodes;
    messages between nodes routed over all NICs; ranks balanced by attention, and linear layers on equal tokens by a
    remap. The paper's thresholds are not public: several are tried, nodes filled by tokens and by attention, with and
    without remap, and the fastest counts; routing where its formula says that it pays. Assumed in its favour: documents
    of one group of ranks share a ring, where the paper has a ring for each; all rings of a rank and its local documents
    hide each other's transfers."""
    attention, topology = _estimate(case).attention_work, case.topology
    candidates: dict[tuple[Group, ...], list[Candidate]] = {}
    for filling in (case.documents.lengths.astype(float), attention):
        for zones in ZONES:
            groups = tuple(zoned_groups(filling, attention, topology.nodes, topology.ranks_per_node, zones))
            if groups not in candidates:
                candidates[groups] = _zoned(case, groups, zones)
    return [candidate for of_groups in candidates.values() for candidate in of_groups]


def _zoned(case: Case, groups: Sequence[Group], zones: Thresholds) -> list[Candidate]:
    """Return the plans of groups, with and without remap."""
    candidate = _rings(case, "Zeppelin", f"zones {zones.node:g}, {zones.rank:g}", groups, interleaved=True)
    per = case.topology.ranks_per_node
    if routing_pays(case.cluster) and any(len({rank // per for rank in group}) > 1 for group in groups):
        candidate = replace(candidate, label=f"{candidate.label}, routed", links=RoutedLinkQueues)
    hidden = case.attention.heads * case.attention.head_dim
    equal = with_linear_layout(candidate.plan, cheapest_mode(candidate.plan, hidden))
    if equal is candidate.plan:
        return [candidate]
    return [candidate, replace(candidate, label=f"{candidate.label}, remap", plan=equal)]


def dhp(case: Case) -> list[Candidate]:
    """Build DHP (arXiv 2602.21788): bins of documents on groups of any number of ranks, a ring in each. Documents are
    packed by best fit, and ranks assigned by its dynamic program over bins and ranks, by this project's speeds of
    kernels and links. Its bound of memory is not public: several are tried, of tokens and of work, and the
    two whose slowest bin is done soonest by the objective are simulated. Assumed in its favour: all bins at once,
    groups inside nodes where they fit, linear layers where attention is, documents of a bin in one ring."""
    lengths, ranks = case.documents.lengths, case.topology.ranks
    work = _estimate(case).work
    plans: dict[tuple[Group, ...], tuple[float, str]] = {}
    for what, sizes in (("tokens", lengths.astype(float)), ("work", work)):
        for factor in ROOM:
            bin_of, needs = packed_bins(sizes, factor * max(float(sizes.sum()), 1e-30) / ranks)
            if needs.sum() > ranks:
                continue
            seconds = ring_seconds(lengths, bin_of, len(needs), ranks, case.attention, case.cluster)
            assigned = assigned_ranks(seconds, needs)
            assert assigned is not None, "there are enough ranks"
            groups = seated(assigned[0], case.topology.nodes, case.topology.ranks_per_node)
            label = f"bins of {factor:g} x mean {what}"
            plans.setdefault(tuple(groups[number] for number in bin_of.tolist()), (assigned[1], label))
    best = sorted(plans, key=lambda groups: plans[groups][0])[:SIMULATED]
    return [_rings(case, "DHP", plans[groups][1], groups, interleaved=False) for groups in best]


def _rings(case: Case, name: str, label: str, groups: Sequence[Group], interleaved: bool) -> Candidate:
    """Return forwarding rings in groups of ranks."""

    def rings(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        return Candidate(label, grouped_rings(name, documents, topology, attention, groups, interleaved))

    return case.once(rings, name, *groups)


def _placement(groups: Sequence[Group]) -> Placement:
    """Return groups with equal shares as a placement of the planner."""
    members = DocumentShares.from_lists(
        [(doc, list(group), [1.0 / len(group)] * len(group)) for doc, group in enumerate(groups)]
    )
    return Placement(PlacementPolicy(1.0, math.inf), members, {})


def _in_groups(case: Case, label: str, groups: Sequence[Group]) -> list[Candidate]:
    """Build plans of documents in groups of ranks: by forwarding rings, or with keys fetched from their owners."""

    def fetched(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        plan = plan_from_placement(_placement(groups), documents, documents, topology, attention, routing=False)
        return Candidate(f"{label}, fetched", plan)

    rings = _rings(case, "dynamic CP", f"{label}, rings", groups, interleaved=False)
    return [rings, case.once(fetched, label, "fetched", *groups)]


def _estimate(case: Case) -> PlacementModel:
    documents, attention = case.documents, case.attention
    layer = LayerCost.for_attention(attention)
    return PlacementModel(documents, documents, case.topology, attention, case.cluster, layer, routing=False)
