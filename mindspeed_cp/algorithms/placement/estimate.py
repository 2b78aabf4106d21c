"""Cost model of placements in a few array operations, for the search.

It counts the seconds of each rank's tiles, the bytes that it receives over in-node links, and those that its node
receives over its NICs. A direction has the phases of all plans of this kind: local blocks while q, k and v are
redistributed to heads, split heads while keys travel, fetched keys while outputs and gradients return. Latencies, and
the launches of fetched keys, are left out, because only placements of one batch are compared; posts of redistributions
count, since every part has its own. :mod:`mindspeed_cp.simulate.simulator` simulates a finished
plan step by step.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from mindspeed_cp.algorithms.placement.policy import DocumentShares, Placement, part_weights
from mindspeed_cp.algorithms.split_local_block import LATE_SHARE
from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost
from mindspeed_cp.cluster.compute import ATTENTION_BACKWARD, LINEAR_BACKWARD
from mindspeed_cp.layout import Documents
from mindspeed_cp.layout.runs import group_starts
from mindspeed_cp.plan.problem import AttentionConfig, Topology, document_pairs

#: Bytes of keys, values and their gradients in the backward divided by those of the forward: K and V once more, and
#: gradients in fp32.
BACKWARD_TRAFFIC = 3.0

#: Share of a rank's work on cut documents that is its local block, and share that waits for the last keys.
LOCAL_SHARE, LAST_ROUND_SHARE = 0.3, 0.25

#: Slow-down of routed transfers against their time on the NICs: relays pass rows on between steps, so the hops follow
#: each other and wait for late ranks.
ROUTING_SLOWDOWN = 2.0


class PhaseSeconds:
    """Seconds of the forward by rank or node.

    Attributes:
        attention: all attention kernels, fp64 [ranks], of which
        cut: documents whose keys are fetched,
        split_node: documents whose heads are split over ranks of one node,
        split: other documents whose heads are split, and
        crossing: those of them that are on several groups of nodes.
        into_node, out_node: redistributions to heads that are split inside a node, and back, fp64 [ranks].
        into, out: the same of other documents, fp64 [ranks].
        largest_into_node, largest_into: of the document with the most of each, fp64 [ranks].
        inside: keys over in-node links, fp64 [ranks].
        routed: keys over NICs that relays pass on, fp64 [nodes].
        nic: keys over NICs that ranks fetch themselves, fp64 [nodes], of which
        last_nic: those of the last group of nodes.
        tokens: tokens that each rank holds, fp64 [ranks].
        parts, parts_across: numbers of parts of documents whose heads are split inside a node, and of the others
            (:mod:`mindspeed_cp.algorithms.placement.policy`).
    """

    def __init__(self, ranks: int, nodes: int, parts: int = 1, parts_across: int = 1) -> None:
        self.parts, self.parts_across = parts, parts_across
        self.attention, self.cut, self.split, self.crossing, self.tokens, self.inside = np.zeros((6, ranks))
        self.split_node, self.into, self.out, self.into_node, self.out_node = np.zeros((5, ranks))
        self.largest_into, self.largest_into_node = np.zeros((2, ranks))
        self.nic, self.last_nic, self.routed = np.zeros((3, nodes))

    def add(self, group: np.ndarray, size: int, **seconds: np.ndarray) -> None:
        """Add values to the sums of all members of groups of `size` neighbours; `group` has the group of each value."""
        for name, value in seconds.items():
            total = getattr(self, name).reshape(-1, size)
            total += np.bincount(group, value, len(total))[:, None]

    def seconds(self, backward: bool, ranks_per_node: int) -> np.ndarray:
        """Return the seconds of one direction, fp64 [ranks]."""
        factor = ATTENTION_BACKWARD if backward else 1.0  # kernel time in units of the forward's
        into, out = (self.into_node, self.into), (self.out_node, self.out)
        # Redistributions before and after the attention of split heads: inside a node, and others.
        (node_before, across_before), (node_after, across_after) = (out, into) if backward else (into, out)
        # Share of the first and of the last part of documents whose heads are split, inside a node and across, or of
        # the largest document if that is more.
        part, part_across = (
            np.where(into > 0, np.maximum(largest / np.maximum(into, 1e-12), part_weights(parts)[0]), 1.0)
            for into, largest, parts in (
                (self.into_node, self.largest_into_node, self.parts),
                (self.into, self.largest_into, self.parts_across),
            )
        )
        gradients = BACKWARD_TRAFFIC - 1 if backward else 0.0
        nic, last_nic, routed = (np.repeat(x, ranks_per_node) for x in (self.nic, self.last_nic, self.routed))
        across, node = self.split * factor, self.split_node * factor
        before_node, before_all = node_before * part, node_before + across_before
        after_node, after_all = node_after * part, node_after + across_after
        local = (self.attention - self.split - self.split_node - (1 - LOCAL_SHARE) * self.cut) * factor
        fetched = (1 - LOCAL_SHARE) * self.cut * factor
        fetches_nothing = self.cut == 0
        key_transfers = np.where(fetches_nothing, 0.0, self.inside + ROUTING_SLOWDOWN * routed)
        is_split = across + node > 0
        late = local * np.where(fetches_nothing, 0.5 * is_split, LATE_SHARE if gradients else 0.0)
        # The first part inside the node, documents over several nodes, the other parts inside the node.
        first_done = np.maximum(local - late, before_node) + node * part
        across_begun = before_node + across_before
        across_done = np.maximum(first_done, across_begun) + across
        keys_crossed = across_begun + nic
        across_done = np.maximum(across_done, keys_crossed + LAST_ROUND_SHARE * self.crossing * factor)
        split_done = np.maximum(across_done + node * (1 - part), before_all + node * part)
        keys_arrived = before_all + key_transfers
        fetched_done = np.maximum(
            split_done + fetched, np.where(fetches_nothing, 0.0, keys_arrived + LAST_ROUND_SHARE * fetched)
        )
        after_across = across_after * part_across
        last = np.where(node > 0, after_node, after_across)
        returned = np.maximum(split_done, keys_arrived) + last + gradients * key_transfers
        across_returned = across_done + after_across + node_after * (1 - part)
        all_returned = np.maximum(first_done, before_all) + after_all
        # Gradients of split heads return while other rounds are computed: NICs carry them after the keys.
        nics_done = np.maximum(keys_crossed + gradients * nic, across_done + gradients * last_nic) + after_across
        return np.maximum.reduce([fetched_done + late, returned, across_returned, all_returned, nics_done])


#: Additional kernel calls of a rank for a document that it shares.
EXTRA_CALLS = 3

#: Parts of the documents whose heads are split inside nodes, and the launches that the kernels of a part must outlast.
MAX_SPLIT_PARTS, PART_LAUNCHES, PART_ROUNDING = 4, 16, 0.7

BYTES_PER_ELEMENT = 2  # of q, k, v and out


@dataclass(frozen=True, eq=False)
class PlacementEstimate:
    """Modelled seconds of one layer, forward and backward.

    Attributes:
        total: seconds until the last rank is done.
        busy: seconds of each rank's kernels, attention and linear layers, fp64 [ranks].
        tokens: tokens of each rank, fp64 [ranks].
        delay: seconds that each rank waits before it is done, fp64 [ranks].
        early: share of a rank's local block for which it has time in the backward before all ranks are there with which
            it computes split heads, fp64 [ranks].
    """

    total: float
    busy: np.ndarray
    tokens: np.ndarray
    delay: np.ndarray
    early: np.ndarray


class PlacementModel:
    """Cost model of the placements of one batch. A tree of documents counts as one document.

    Args:
        queries, keys: documents by lengths of queries and of keys.
        topology: context-parallel ranks.
        attention: attention of one layer.
        cluster: devices and links, with `topology.ranks_per_node` ranks on a node.
        layer: linear part of a layer.
        routing: keys and values cross to a node once, and are passed on inside it.

    Attributes:
        attention_work: seconds of each document's attention on one rank, forward and backward, fp64 [documents].
        work: the same with its linear layers.
        bound: lower bound of all plans in seconds: perfect balance, whole tiles, no exposed communication.
    """

    def __init__(
        self,
        queries: Documents,
        keys: Documents,
        topology: Topology,
        attention: AttentionConfig,
        cluster: Cluster,
        layer: LayerCost,
        routing: bool,
    ) -> None:
        self.topology, self.attention, self.cluster, self.routing = topology, attention, cluster, routing
        self.cost = ComputeCost(cluster, attention, layer)
        self.lengths = queries.tree_sums(queries.lengths)
        self.pairs = queries.tree_sums(document_pairs(queries, keys, attention))
        self.alone = self.cost.attention_seconds(self.pairs, self.lengths)  # forward, on one rank
        self.linear = self.cost.linear_layer_seconds(self.lengths)
        self.attention_work = self.alone * (1 + ATTENTION_BACKWARD)
        self.work = self.attention_work + self.linear * (1 + LINEAR_BACKWARD)
        self.bound = float(self.work.sum()) / topology.ranks
        self.kv_row = attention.kv_row.channels * BYTES_PER_ELEMENT
        self.q_row = attention.heads * attention.head_dim * BYTES_PER_ELEMENT
        self.out_row = attention.heads * attention.head_dim_v * BYTES_PER_ELEMENT
        self._node_rate = cluster.nics_per_node * cluster.effective_nic  # bytes/second of all NICs of a node

    def with_most_fixed_costs(self) -> PlacementModel:
        """Return the model of the same batch with launches, posts and latencies that take the most that they may."""
        out = copy(self)
        out.cluster = self.cluster.at_range_end(True, ("launch", "posting", "in_node_latency", "network_latency"))
        out.cost = ComputeCost(out.cluster, self.attention, self.cost.layer)
        return out

    def divided(self, with_linear: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Return the costs of documents that ranks share, fp64 [documents] each: seconds in long tiles, to be divided
        by shares, and seconds that each of the ranks adds because its tiles are short.

        Tiles have rows / 2 rows on their shorter side, as in `score`, so the added seconds do not depend on the share.
        """
        long = self.cost.attention_seconds(self.pairs, 1e12)
        added = (self.cost.attention_seconds(self.pairs, self.lengths / 2) - long) + EXTRA_CALLS * self.cluster.launch
        linear = self.linear * (1 + LINEAR_BACKWARD) if with_linear else 0.0
        return long * (1 + ATTENTION_BACKWARD) + linear, added * (1 + ATTENTION_BACKWARD)

    def score(self, placement: Placement) -> PlacementEstimate:
        """Return the estimate of a placement."""
        ranks, topology = self.topology.ranks, self.topology
        phases = PhaseSeconds(ranks, topology.nodes, placement.parts, placement.parts_across)
        self._add_fetched(placement.whole, phases)
        for size, members in placement.split.items():
            self._add_split(size, members, phases)
        forward, backward = (phases.seconds(backward, topology.ranks_per_node) for backward in (False, True))
        linear = self.cost.linear_layer_seconds(phases.tokens) * (1 + LINEAR_BACKWARD)
        redistribution = 0.0
        if placement.policy.remap:  # q, k, v and out move between two layouts, forward and backward
            linear, mean = np.full(ranks, linear.mean()), phases.tokens.mean()
            of_nodes = phases.tokens.reshape(-1, topology.ranks_per_node).sum(1)
            rank_surplus, node_surplus = phases.tokens.max() - mean, of_nodes.max() - mean * topology.ranks_per_node
            row = self.q_row + self.kv_row + self.out_row
            on_nics = node_surplus * row / self._node_rate
            redistribution = 2 * max(rank_surplus * row / self.cluster.effective_rank, on_nics, 0.0)
        ready = forward + linear  # to begin the backward
        last = float((ready + backward).max())
        # Ranks with more linear work reach the backward later; those that share documents with them wait for them.
        cut = ATTENTION_BACKWARD * (1 - LOCAL_SHARE) * phases.cut
        split = ATTENTION_BACKWARD * (phases.split + phases.split_node)
        shared = [(1, placement.whole, cut), *((size, members, split) for size, members in placement.split.items())]
        met = ready.copy()  # when all ranks are there with which a rank computes split heads
        for size, members, work in shared:
            if len(members.doc):
                group_ready, group_work = (x.reshape(-1, size).max(1) for x in (ready, work))
                first = group_starts(members.doc)
                latest = np.maximum.reduceat(group_ready[members.rank], first)
                latest = np.repeat(latest, np.diff(np.append(first, len(members.doc))))
                last = max(last, float((latest + group_work[members.rank]).max()))
                if members is not placement.whole:
                    group_met = np.zeros(len(group_ready))
                    np.maximum.at(group_met, members.rank, latest)
                    met = np.maximum(met, np.repeat(group_met, size))
        local = ATTENTION_BACKWARD * (phases.attention - phases.split - phases.split_node - phases.cut)
        early = np.clip((met - ready) / np.maximum(local, 1e-12), 0.0, 1.0)
        busy = phases.attention * (1 + ATTENTION_BACKWARD) + linear
        return PlacementEstimate(last + redistribution, busy, phases.tokens, ready + backward - busy, early)

    def _add_fetched(self, members: DocumentShares, phases: PhaseSeconds) -> None:
        """Add the documents whose keys are fetched, and those on a single rank."""
        cluster, ranks_per_node, nodes = self.cluster, self.topology.ranks_per_node, self.topology.nodes
        doc, rank, share = members.doc, members.rank, members.share
        if not len(doc):
            return
        size = np.bincount(doc, minlength=len(self.lengths))[doc]
        rows = share * self.lengths[doc]
        cut = size > 1
        short_side, calls = np.where(cut, rows / 2, rows), np.where(cut, EXTRA_CALLS, 0)
        seconds = self.cost.attention_seconds(self.pairs[doc] * share, short_side, calls)
        phases.add(rank, 1, attention=seconds, tokens=rows)
        if not cut.any():
            return
        doc, rank, share = doc[cut], rank[cut], share[cut]
        phases.add(rank, 1, cut=seconds[cut])
        needed = self._needed_shares(doc, share) * self.lengths[doc]  # tokens of other members
        doc_nodes, doc_node, members_on_node = np.unique(
            doc * nodes + rank // ranks_per_node, return_inverse=True, return_counts=True
        )
        node_share = np.bincount(doc_node, weights=share)
        own_node = node_share[doc_node]
        others = np.maximum(1 - share, 1e-12)
        in_node_bytes = needed * (own_node - share) / others * self.kv_row
        internode_bytes = needed * (1 - own_node) / others * self.kv_row
        links = np.maximum(members_on_node[doc_node] - 1, 1)
        phases.add(rank, 1, inside=in_node_bytes / np.minimum(cluster.effective_rank, links * cluster.effective_pair))
        if nodes == 1:
            return
        if not self.routing:
            phases.add(rank, 1, inside=internode_bytes / (self._node_rate / ranks_per_node))
            return
        node_doc, node = doc_nodes // nodes, doc_nodes % nodes
        nodes_of_doc = np.bincount(node_doc, minlength=len(self.lengths))
        received = self.lengths[node_doc] * (1 - node_share) * self.kv_row
        sent = self.lengths[node_doc] * node_share * (nodes_of_doc[node_doc] - 1) * self.kv_row
        np.add.at(phases.routed, node, np.maximum(received, sent) / self._node_rate)
        relay_rate = min(cluster.effective_rank, max(ranks_per_node - 1, 1) * cluster.effective_pair)
        phases.add(rank, 1, inside=internode_bytes * (ranks_per_node - 1) / ranks_per_node / relay_rate)

    def in_parts(self, placement: Placement) -> Placement:
        """Return the placement with the numbers of parts of documents whose heads are split, inside nodes and across:
        up to MAX_SPLIT_PARTS, none with less work on the mean rank than PART_LAUNCHES launches take.

        Of p equal parts a p-th of the redistributions would be exposed, and each costs its launch and its posts: the
        sum is least at the root of their ratio. Parts are not equal, but their own least sum gave no faster plans.
        """
        if not placement.split:
            return placement
        ranks, launch, counts = self.topology.ranks, self.cluster.launch, []
        sizes: dict[bool, dict[int, DocumentShares]] = {False: {}, True: {}}  # by whether they cross nodes
        for size, members in placement.split.items():
            several = np.bincount(members.doc, minlength=len(self.lengths))[members.doc] > 1
            crosses = several | (size > self.topology.ranks_per_node)
            for across, chosen in ((False, ~crosses), (True, crosses)):
                if chosen.any():
                    sizes[across][size] = members.select(chosen)
        for across in (False, True):
            seconds = sum(float(self.alone[each.doc] @ each.share) for each in sizes[across].values()) / ranks
            part_seconds = self._launch_overhead(max(sizes[across], default=1)) + launch
            if part_seconds == 0:
                counts.append(MAX_SPLIT_PARTS)
                continue
            most = seconds / (PART_LAUNCHES * launch) if launch else MAX_SPLIT_PARTS
            travel = sum(
                float(self.redistribution_work(size)[each.doc] @ each.share) for size, each in sizes[across].items()
            )
            best = (travel / 2 / ranks / part_seconds) ** 0.5
            counts.append(int(np.clip(np.floor(min(most, best + PART_ROUNDING)), 1, MAX_SPLIT_PARTS)))
        return replace(placement, parts=counts[0], parts_across=counts[1])

    def _launch_overhead(self, size: int) -> float:
        """Return the seconds in which a rank posts the messages of one direction of a part whose heads are split over
        `size` ranks: q, k and v, which are one message if they are small, and out, to each of the others and from
        each."""
        return 4 * (size - 1) * self.cluster.posting

    def _redistribution_seconds(self, size: int) -> tuple[float, float]:
        """Return the seconds in which each of a group of `size` ranks gets its heads of a byte of a document's rows,
        for all heads, and how many ranks of the group get a key/value head. Of the rows that a rank gets, one of `size`
        is its own, and others come from its node or over its share of the NICs."""
        cluster, ranks_per_node = self.cluster, self.topology.ranks_per_node
        peers = min(size, ranks_per_node) - 1
        seconds = peers / size / max(min(cluster.effective_rank, peers * cluster.effective_pair), 1.0)
        if size > ranks_per_node:
            seconds = max(seconds, (1 - ranks_per_node / size) / (self._node_rate / ranks_per_node))
        return seconds / size, max(1.0, min(size, self.attention.heads) / self.attention.kv_row.heads)

    def redistribution_work(self, size: int) -> np.ndarray:
        """Return the seconds of each document's redistributions over a group of `size` ranks, both ways, forward and
        backward, summed over the ranks, fp64 [documents]."""
        seconds, copies = self._redistribution_seconds(size)
        return 2 * size * self.lengths * (self.q_row + self.kv_row * copies + self.out_row) * seconds

    def _add_split(self, size: int, members: DocumentShares, phases: PhaseSeconds) -> None:
        """Add the documents whose heads are split over groups of `size` ranks, and fetched between groups."""
        doc, group, share = members.doc, members.rank, members.share
        if not len(doc):
            return
        cluster, attention, groups = self.cluster, self.attention, self.topology.ranks // size
        rows = share * self.lengths[doc]
        count = np.bincount(doc, minlength=len(self.lengths))[doc]
        several = count > 1
        busy = min(size, attention.heads)
        head_share = -(-attention.heads // busy) / attention.heads  # of the rank with the most heads
        short_side = np.where(several, rows / 2, rows)
        seconds = self.cost.attention_seconds(self.pairs[doc] * share * head_share, short_side)
        per_byte, copies = self._redistribution_seconds(size)
        into, out = rows * per_byte * (self.q_row + self.kv_row * copies), rows * per_byte * self.out_row
        in_node = ~several & (size <= self.topology.ranks_per_node)
        for inside, chosen in (("_node", in_node), ("", ~in_node)):
            added = {"attention": seconds, f"split{inside}": seconds, "tokens": rows / size,
                     f"into{inside}": into, f"out{inside}": out}  # fmt: skip
            phases.add(group[chosen], size, **{name: value[chosen] for name, value in added.items()})
            calls = np.zeros(groups)  # all documents of a step share one call
            parts = float(phases.parts if inside else phases.parts_across)
            # Attention takes longer in the backward, launches of messages do not.
            launches = parts * self._launch_overhead(size) * 2 / (1 + ATTENTION_BACKWARD)
            steps = np.where(several, 2.0 * parts, parts) * cluster.launch + launches
            np.maximum.at(calls, group[chosen], steps[chosen])
            phases.add(np.arange(groups), size, **{"attention": calls, f"split{inside}": calls})
            largest = getattr(phases, f"largest_into{inside}").reshape(groups, size)
            np.maximum.at(largest, group[chosen], into[chosen][:, None])
        if several.any():
            nodes = size // self.topology.ranks_per_node
            needed = self._needed_shares(doc, share) * self.lengths[doc] * self.kv_row * copies / nodes
            last = needed / np.maximum(count - 1, 1)
            phases.add(group, nodes, nic=needed / self._node_rate, last_nic=last / self._node_rate)
            phases.add(group, size, crossing=seconds * several)

    def _needed_shares(self, doc: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Return the share of its document that each member needs from the other members."""
        if not self.attention.is_triangular:
            return 1 - share
        before = np.cumsum(share)
        ends = np.append(group_starts(doc)[1:], len(doc))  # of the members of each document
        after = np.repeat(before[ends - 1], np.diff(ends, prepend=0)) - before  # shares inside the mirror image
        return 0.5 * (1 - share) + 0.5 * after
