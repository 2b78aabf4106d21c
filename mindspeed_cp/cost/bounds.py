"""What a layer takes at least, so that the slow need not be simulated, nor always built."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.cost.compute import ComputeCost
from mindspeed_cp.cost.layout_work import attention_floor
from mindspeed_cp.cost.linear import linear_seconds
from mindspeed_cp.cost.links import Links
from mindspeed_cp.cost.transfers import GRADIENT, transfers
from mindspeed_cp.layout import Documents, Layout
from mindspeed_cp.plan.config import Topology
from mindspeed_cp.plan.placement import place, visible_pairs
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.visibility import visible_tokens

#: Rows of the shorter side of tiles that are as fast as tiles can be.
LONG = 1e12


@dataclass(frozen=True)
class Floor:
    """Seconds of one layer, forward and backward, that a simulation never falls below.

    Attributes:
        compute: of the rank with most to do, or of the mean one: its linear layers, and its attention in tiles as long
            as they can be.
        links: of a rank or a link: its messages of both directions, and linear layers between them; 0 where it is not
            known.
    """

    compute: float
    links: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the whole layer."""
        return max(self.compute, self.links)

    @property
    def cause(self) -> str:
        """What it is."""
        return "its busiest link" if self.links > self.compute else "its work"


def even_floor(documents: Documents, ranks: int, cost: ComputeCost) -> Floor:
    """That of any plan of a batch: perfect balance, nothing exposed."""
    tokens = documents.tokens / ranks
    pairs = visible_pairs(documents, documents, cost.attention).sum() / ranks
    total = 0.0
    for backward in (False, True):
        total += float(cost.linear_seconds(tokens, backward)) + float(cost.attention_seconds(pairs, LONG, 0, backward))
    return Floor(total)


def plan_floor(plan: Plan, cost: ComputeCost) -> Floor:
    """That of a plan. By its messages: a rank's own in the forward, then its linear layers, then its own in the
    backward; or all of a link in both directions (:func:`_on_links`)."""
    cluster, nodes = cost.cluster, plan.topology.nodes
    there, back = (linear_seconds(plan, cost, backward) for backward in (False, True))
    linear, work = there.rest + back.rest, there.total + back.total
    own, busy = [], []
    for direction in ("forward", "backward"):
        links, table = Links(cluster, nodes), transfers(plan, direction, cost.layer)
        links.serve(table["src"], table["dst"], table["bytes"], np.zeros(len(table)))
        busy.append({name: links.busy[links.names == name] for name in links.first})
        own.append(_own_seconds(table, plan.ranks, cluster))
    for piece in plan.pieces:
        work = work + sum(attention_floor(piece.q_layout, piece.kv_documents, cost))
    by_links = max(
        _on_links(busy[0][name], busy[1][name], own[0], own[1], name, plan.topology, cluster) for name in busy[0]
    )
    return Floor(float(np.max(work)), max(float((own[0] + linear + own[1]).max()), by_links + float(np.min(linear))))


def _on_links(
    there: np.ndarray,
    back: np.ndarray,
    own_there: np.ndarray,
    own_back: np.ndarray,
    name: str,
    topology: Topology,
    cluster: Cluster,
) -> float:
    """Seconds of the busiest link of a kind, of which `there` and `back` are busy in the two directions.

    A rank does not begin its backward before its forward is done. Where ranks share a NIC some may be in their backward
    while others are not: it is all of the forward and then one rank's backward, or one's forward and then all of the
    backward.
    """
    per, nics = topology.ranks_per_node, cluster.nics_per_node
    if not name.startswith("nic") or nics == per:
        return float((there + back).max(initial=0))
    nic = _nics(topology, cluster)
    least_there, least_back = np.full((2, len(there)), np.inf)
    np.minimum.at(least_there, nic, own_there)
    np.minimum.at(least_back, nic, own_back)
    return float(np.maximum(there + least_back, least_there + back).max(initial=0))


def busiest_links(plan: Plan, cost: ComputeCost) -> tuple[float, float]:
    """Seconds of the busiest link with all its bytes in a row, forward and backward."""
    found = []
    for direction in ("forward", "backward"):
        links, table = Links(cost.cluster, plan.topology.nodes), transfers(plan, direction, cost.layer)
        links.serve(table["src"], table["dst"], table["bytes"], np.zeros(len(table)))
        found.append(float(links.busy.max()))
    return found[0], found[1]


def _own_seconds(table: np.ndarray, ranks: int, cluster: Cluster) -> np.ndarray:
    """Seconds of each rank's messages over the links that it has alone, or if it had its NIC alone: of the four ways,
    in or out, in the node or between nodes, the longest, fp64 [ranks]."""
    far = table["src"] // cluster.ranks_per_node != table["dst"] // cluster.ranks_per_node
    ways = [
        np.bincount(table[end][some], table["bytes"][some], ranks) / rate
        for end in ("src", "dst")
        for some, rate in ((far, cluster.effective_nic), (~far, cluster.effective_rank))
    ]
    found: np.ndarray = np.max(ways, axis=0)
    return found


def layout_floor(documents: Documents, ranks: int, cost: ComputeCost, layout: str) -> Floor:
    """That of every plan that computes all heads of queries where a layout has them: by its work."""
    queries, _ = place(layout, documents, documents, ranks, cost.attention)
    return Floor(_work(queries, documents, cost))


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Layouts of an exchange, and seconds that a rank's incoming keys, and its outgoing gradients, take at least if it
    had its NIC alone, fp64 [ranks]; of the NIC that ranks share (or a rank's links, in one node) each, fp64 [nics]."""

    queries: Layout
    there: np.ndarray
    back: np.ndarray
    enters: np.ndarray
    leaves: np.ndarray


def _exchange(documents: Documents, topology: Topology, cost: ComputeCost, layout: str) -> _Exchange:
    """To a rank come, between nodes, at least the rows that it sees less all that its node has; in one node, those that
    it does not have itself. In the backward the same rows come again, and their gradients go back in fp32."""
    attention, cluster, per = cost.attention, cost.cluster, topology.ranks_per_node
    queries, keys = place(layout, documents, documents, topology.ranks, attention)
    seen = np.array([int((runs[:, 1] - runs[:, 0]).sum()) for runs in visible_tokens(queries, keys, attention)])
    row, element = attention.kv_heads * (attention.head_dim + attention.head_dim_v), cost.layer.bytes_per_element
    if topology.nodes == 1:
        away, link, rate = seen - keys.token_counts, np.arange(topology.ranks), cluster.effective_rank
    else:
        held = keys.token_counts.reshape(topology.nodes, per).sum(1)
        away, link = np.maximum(seen - np.repeat(held, per), 0), _nics(topology, cluster)
        rate = cluster.effective_nic
    there, back = away * row * element / rate, away * row * max(element, GRADIENT) / rate
    return _Exchange(queries, there, back, np.bincount(link, there), np.bincount(link, back))


def exchange_links(documents: Documents, topology: Topology, cost: ComputeCost, layout: str) -> tuple[float, float]:
    """Seconds of the busiest link of such a plan, forward and backward, if a NIC's ranks send as much as they get."""
    found = _exchange(documents, topology, cost, layout)
    return float(found.enters.max()), float(found.leaves.max())


def exchange_floor(documents: Documents, topology: Topology, cost: ComputeCost, layout: str) -> Floor:
    """That of every plan over a layout whose ranks take the keys that they see from their owners, without relays."""
    found = _exchange(documents, topology, cost, layout)
    linear, work = _linear(found.queries, cost), _work(found.queries, documents, cost)
    alone = float((found.there + linear + found.back).max())
    if topology.nodes == 1:
        return Floor(work, alone)
    # What enters a NIC does so in both directions.
    shared = _on_links(found.enters, found.enters, found.there, found.back, "nic in", topology, cost.cluster)
    return Floor(work, max(alone, shared + float(linear.min())))


def _linear(queries: Layout, cost: ComputeCost) -> np.ndarray:
    """Seconds of each rank's linear layers, both directions, fp64 [ranks]."""
    both: np.ndarray = sum(cost.linear_seconds(queries.token_counts, backward) for backward in (False, True))
    return both


def _work(queries: Layout, keys: Documents, cost: ComputeCost) -> float:
    """Seconds of the busiest rank's linear layers, and of its attention at least."""
    return float((sum(attention_floor(queries, keys, cost)) + _linear(queries, cost)).max())


def _nics(topology: Topology, cluster: Cluster) -> np.ndarray:
    """The NIC of each rank, numbered over all nodes, int64 [ranks]."""
    rank, per, nics = np.arange(topology.ranks), topology.ranks_per_node, cluster.nics_per_node
    return rank // per * nics + rank % per * nics // per
