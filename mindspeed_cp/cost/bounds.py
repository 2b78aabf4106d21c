"""What a layer takes at least, so that the slow need not be simulated, nor always built."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cost.compute import ComputeCost
from mindspeed_cp.cost.links import Links
from mindspeed_cp.cost.transfers import GRADIENT, transfers
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.config import Topology
from mindspeed_cp.plan.placement import place, visible_pairs
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.visibility import visible_tokens

#: Rows of the shorter side of tiles that are as fast as tiles can be.
LONG = 1e12


@dataclass(frozen=True)
class Floor:
    """Seconds of one layer without which it cannot be done, forward and backward.

    Attributes:
        linear: evenly spread linear layers.
        attention: evenly spread attention in long tiles, of each direction.
        links: the busiest link with all its bytes in a row, of each direction; 0 where it is not known.
    """

    linear: float
    attention: tuple[float, float]
    links: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        """Of the whole layer: in each direction links or attention, whichever takes longer."""
        return self.linear + sum(map(max, self.attention, self.links))

    @property
    def cause(self) -> str:
        """What most of it is for, besides linear layers."""
        return "its busiest link" if sum(self.links) > sum(self.attention) else "attention"


def even_floor(documents: Documents, ranks: int, cost: ComputeCost) -> Floor:
    """That of any plan of a batch whose documents attend to themselves: perfect balance, nothing exposed."""
    tokens = documents.tokens / ranks
    linear = float(cost.linear_seconds(tokens) + cost.linear_seconds(tokens, backward=True))
    pairs = visible_pairs(documents, documents, cost.attention).sum() / ranks
    there, back = (float(cost.attention_seconds(pairs, LONG, 0, backward)) for backward in (False, True))
    return Floor(linear, (there, back))


def plan_floor(plan: Plan, cost: ComputeCost) -> Floor:
    """That of a plan, by the bytes of its messages."""
    even = even_floor(plan.documents, plan.ranks, cost)
    pairs = visible_pairs(plan.documents, plan.kv_documents, plan.attention).sum() / plan.ranks
    there, back = (float(cost.attention_seconds(pairs, LONG, 0, backward)) for backward in (False, True))
    busy = []
    for direction in ("forward", "backward"):
        links, table = Links(cost.cluster, plan.topology.nodes), transfers(plan, direction, cost.layer)
        links.serve(table["src"], table["dst"], table["bytes"], np.zeros(len(table)))
        busy.append(float(links.busy.max()))
    return Floor(even.linear, (there, back), (busy[0], busy[1]))


def exchange_floor(documents: Documents, topology: Topology, cost: ComputeCost, layout: str) -> Floor:
    """That of every plan over a layout whose ranks take the keys that they see from their owners, without relays.

    Between nodes by the NICs: to a rank come at least the rows that it sees less all that its node has. In one node by
    the links of a rank. In the backward the same rows come again, and their gradients go back in fp32.
    """
    attention, cluster, per = cost.attention, cost.cluster, topology.ranks_per_node
    queries, keys = place(layout, documents, documents, topology.ranks, attention)
    seen = np.array([int((runs[:, 1] - runs[:, 0]).sum()) for runs in visible_tokens(queries, keys, attention)])
    nodes, held = topology.nodes, keys.token_counts
    if nodes > 1:
        away = np.maximum(seen - np.repeat(held.reshape(nodes, per).sum(1), per), 0)
        local = np.arange(topology.ranks) % per
        nic = np.arange(topology.ranks) // per * cluster.nics_per_node + local * cluster.nics_per_node // per
        rows, rate = np.bincount(nic, away), cluster.effective_nic
    else:
        rows, rate = seen - held, cluster.effective_rank
    each = attention.kv_heads * (attention.head_dim + attention.head_dim_v) / rate * float(rows.max(initial=0))
    element = cost.layer.bytes_per_element
    even = even_floor(documents, topology.ranks, cost)
    return Floor(even.linear, even.attention, (each * element, each * max(element, GRADIENT)))
