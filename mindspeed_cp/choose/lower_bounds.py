"""Lower bounds of a layer's seconds, by which slow candidates are dropped without a simulation, or without a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.algorithms.kv_fetch.needs import needed_tokens
from mindspeed_cp.algorithms.layouts import build_layouts
from mindspeed_cp.cluster.cluster import Cluster
from mindspeed_cp.cluster.compute import ATTENTION_BACKWARD, LINEAR_BACKWARD, ComputeCost
from mindspeed_cp.layout import Documents, Layout
from mindspeed_cp.plan.problem import Topology, document_pairs, run_pairs
from mindspeed_cp.plan.program import DIRECTIONS, Plan
from mindspeed_cp.plan.transfers import GRADIENT_BYTES, transfers
from mindspeed_cp.simulate.link_queues import LinkQueues
from mindspeed_cp.simulate.simulator import linear_times


@dataclass(frozen=True)
class LowerBound:
    """Seconds of one layer, forward and backward, that no simulation falls below.

    Attributes:
        compute: linear layers and attention, in tiles as long as possible, of the busiest rank or of the mean rank.
        links: messages of a rank or a link in both directions and the linear layers between them; 0 if unknown.
    """

    compute: float
    links: float = 0.0

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.compute, self.links)

    @property
    def limited_by(self) -> str:
        """Name of the larger of the two."""
        return "its busiest link" if self.links > self.compute else "its work"


def balanced_lower_bound(
    documents: Documents, ranks: int, cost: ComputeCost, kv_documents: Documents | None = None
) -> float:
    """Return the bound in seconds of all plans of a batch: perfect balance, tiles as long as their documents, no
    exposed communication; kv_documents: in cross-attention, lengths of the keys of each document."""
    keys = documents if kv_documents is None else kv_documents
    lengths = documents.tree_sums(documents.lengths)
    pairs = documents.tree_sums(document_pairs(documents, keys, cost.attention))
    shorter = np.minimum(lengths, keys.tree_sums(keys.lengths))
    attention = cost.attention_seconds(pairs, shorter) * (1 + ATTENTION_BACKWARD)
    return float((attention + cost.linear_layer_seconds(lengths) * (1 + LINEAR_BACKWARD)).sum()) / ranks


def plan_lower_bound(plan: Plan, cost: ComputeCost) -> LowerBound:
    """Return the bound of a plan.

    Its link term is the larger of a rank's own messages with its linear layers between the two directions, and all
    messages of a link in both directions (:func:`_both_directions`).
    """
    linear = [linear_times(plan, cost, backward) for backward in (False, True)]
    between = linear[0].rest + linear[1].rest
    work = linear[0].total + linear[1].total
    for part in plan.parts_or_self:
        work = work + sum(min_attention_seconds(part.q_layout_compute, part.kv_documents, cost))
    served = [_served_links(plan, direction, cost) for direction in DIRECTIONS]
    own = [_own_link_seconds(table, plan.ranks, cost.cluster) for _, table in served]
    busiest = 0.0
    for kind in served[0][0].first_of_kind:
        busy = [links.busy_seconds[links.kind_of_link == kind] for links, _ in served]
        busiest = max(busiest, _both_directions(busy[0], busy[1], own[0], own[1], kind, plan.topology, cost.cluster))
    by_rank = float((own[0] + between + own[1]).max())
    return LowerBound(float(np.max(work)), max(by_rank, busiest + float(np.min(between))))


def _served_links(plan: Plan, direction: str, cost: ComputeCost) -> tuple[LinkQueues, np.ndarray]:
    """Return the links after all messages of a direction, posted at once, and the table of these messages."""
    links = LinkQueues(cost.cluster, plan.topology.nodes)
    table = transfers(plan, direction, cost.layer.bytes_per_element, cost.layer.hidden_row_bytes)
    links.serve(table["src"], table["dst"], table["bytes"], np.zeros(len(table)))
    return links, table


def _both_directions(
    forward: np.ndarray,
    backward: np.ndarray,
    own_forward: np.ndarray,
    own_backward: np.ndarray,
    kind: str,
    topology: Topology,
    cluster: Cluster,
) -> float:
    """Return the seconds of the busiest link of a kind for both directions.

    A rank begins its backward after its forward. Ranks that share a NIC may be in different directions: the bound is
    the whole forward and then one rank's backward, or one rank's forward and then the whole backward.

    Args:
        forward, backward: busy seconds of the links, fp64 [links].
        own_forward, own_backward: seconds of each rank's own messages, fp64 [ranks].
        kind: kind of the links (:class:`LinkQueues`).
    """
    if not kind.startswith("nic") or cluster.nics_per_node == topology.ranks_per_node:
        return float((forward + backward).max(initial=0))
    nic = cluster.nic_of(np.arange(topology.ranks))
    least_forward, least_backward = np.full((2, len(forward)), np.inf)
    np.minimum.at(least_forward, nic, own_forward)
    np.minimum.at(least_backward, nic, own_backward)
    return float(np.maximum(forward + least_backward, least_forward + backward).max(initial=0))


def _own_link_seconds(table: np.ndarray, ranks: int, cluster: Cluster) -> np.ndarray:
    """Return the seconds of each rank's messages over its own links, as if it had its NIC to itself, fp64 [ranks].

    The largest of four: in or out, inside the node or between nodes.
    """
    internode = table["src"] // cluster.ranks_per_node != table["dst"] // cluster.ranks_per_node
    seconds = [
        np.bincount(table[end][mask], table["bytes"][mask], ranks) / rate
        for end in ("src", "dst")
        for mask, rate in ((internode, cluster.effective_nic), (~internode, cluster.effective_rank))
    ]
    out: np.ndarray = np.max(seconds, axis=0)
    return out


def layout_lower_bound(documents: Documents, ranks: int, cost: ComputeCost, layout: str) -> LowerBound:
    """Return the bound, by work, of all plans that compute all heads of queries on the rank that holds them."""
    queries, _ = build_layouts(layout, documents, documents, ranks, cost.attention)
    return LowerBound(_busiest_work(queries, documents, cost))


def _kv_fetch_times(
    documents: Documents, topology: Topology, cost: ComputeCost, layout: str, gradient_bytes: int
) -> tuple[Layout, tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Bound the seconds of fetching keys and values over a layout.

    Incoming rows of each rank are, between nodes, the visible rows minus all rows of its node; in a single node the
    visible rows minus its own. In the backward the same rows come again, and their gradients return.

    Returns:
        The layout of the queries; forward and backward of each rank as if it had its NIC to itself, fp64 [ranks]; and
        of each NIC, or of each rank's links in a single node, fp64 [nics].
    """
    attention, cluster, ranks_per_node = cost.attention, cost.cluster, topology.ranks_per_node
    queries, keys = build_layouts(layout, documents, documents, topology.ranks, attention)
    needed = needed_tokens(queries, keys, attention)
    visible = np.bincount(needed.taker, needed.last - needed.first, topology.ranks).astype(np.int64)
    row = min(attention.kv_row.channels, attention.expanded.kv_row.channels)  # a plan may send latents or not
    element = cost.layer.bytes_per_element
    if topology.nodes == 1:
        rows, link, rate = visible - keys.token_counts, np.arange(topology.ranks), cluster.effective_rank
    else:
        node_rows = np.repeat(keys.token_counts.reshape(topology.nodes, ranks_per_node).sum(1), ranks_per_node)
        rows, link = np.maximum(visible - node_rows, 0), cluster.nic_of(np.arange(topology.ranks))
        rate = cluster.effective_nic
    forward, backward = rows * row * element / rate, rows * row * max(element, gradient_bytes) / rate
    return queries, (forward, backward), (np.bincount(link, forward), np.bincount(link, backward))


def kv_fetch_lower_bound(
    documents: Documents,
    topology: Topology,
    cost: ComputeCost,
    layout: str,
    gradient_bytes: int = GRADIENT_BYTES,
) -> LowerBound:
    """Return the bound of all plans over a layout in which ranks fetch visible keys from their owners, without
    relays; gradient_bytes: of an element of the gradients of keys and values."""
    queries, (forward, backward), (incoming, _) = _kv_fetch_times(documents, topology, cost, layout, gradient_bytes)
    linear, work = _linear_seconds(queries, cost), _busiest_work(queries, documents, cost)
    by_rank = float((forward + linear + backward).max())
    if topology.nodes == 1:
        return LowerBound(work, by_rank)
    # Rows enter a NIC in both directions.
    shared = _both_directions(incoming, incoming, forward, backward, "nic in", topology, cost.cluster)
    return LowerBound(work, max(by_rank, shared + float(linear.min())))


def _linear_seconds(queries: Layout, cost: ComputeCost) -> np.ndarray:
    """Return the seconds of each rank's linear layers in both directions, fp64 [ranks]."""
    seconds: np.ndarray = sum(cost.linear_layer_seconds(queries.token_counts, backward) for backward in (False, True))
    return seconds


def _busiest_work(queries: Layout, keys: Documents, cost: ComputeCost) -> float:
    """Return the least seconds of the busiest rank's linear layers and attention."""
    return float((sum(min_attention_seconds(queries, keys, cost)) + _linear_seconds(queries, cost)).max())


def min_attention_seconds(queries: Layout, keys: Documents, cost: ComputeCost) -> tuple[np.ndarray, np.ndarray]:
    """Return the least seconds of each rank's attention in any plan with these queries, forward and backward.

    A tile has rows of one document, or of one tree, so its shorter side is at most the rank's number of queries of it.

    Args:
        queries: layout in which queries are computed, with heads.
        keys: documents of the keys.
        cost: of the kernels.

    Returns:
        fp64 [ranks] each.
    """
    attention, spans = cost.attention, queries.spans
    documents = queries.documents
    pairs = run_pairs(spans["doc"], spans["start"], spans["stop"], documents, keys, attention)
    head_share = (queries.head_counts(attention.heads) / attention.heads)[spans["rank"]]
    _, group = np.unique(spans["rank"] * max(len(documents), 1) + documents.roots[spans["doc"]], return_inverse=True)
    length = spans["stop"] - spans["start"]
    rows = np.bincount(group, length)[group] if len(group) else np.zeros(0)  # of the span's rank and document or tree
    work = pairs * head_share * (1.0 + cost.cluster.tile_rows / np.maximum(rows, 1.0))
    rank_work = np.bincount(spans["rank"], work, queries.ranks)
    return cost.attention_seconds(rank_work, np.inf), cost.attention_seconds(rank_work, np.inf, 0, True)
