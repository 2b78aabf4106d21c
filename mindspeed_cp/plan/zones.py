"""From which length on a document is worth cutting: where the cost of its transfers meets that of its attention.

Attention grows with the square of the length, transfers with the length. A document of L tokens over two ranks of a
node has its keys exchanged in `bytes(L) / in-node rate`, beside `attention(L) / 2`; below the length where the two are
equal, cutting only adds waiting, and the document is local. Above it, up to where crossing to a second node would be
hidden by the attention of a node's ranks, it stays in a node. (Zeppelin, 2509.21841, cuts in the same three zones.)
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_cp.plan.estimate import BACKWARD_TRAFFIC, Estimate


@dataclass(frozen=True)
class Zones:
    """Lengths in tokens at which the curves cross.

    Attributes:
        local: shorter documents are not worth cutting for speed.
        node: shorter documents are not worth cutting over nodes.
    """

    local: float
    node: float


def zones(estimate: Estimate) -> Zones:
    """Zones of a batch's attention and cluster.

    Forward and backward together: transfers of 1 + 3 times K and V of half the document for each of two sides, and
    attention's pairs at the efficiency of long tiles, n(n+1)/2 of them under a causal mask. So both curves are
    polynomials and cross once, at L = transfers per token / attention per pair.
    """
    cluster, attention, cost = estimate.cluster, estimate.attention, estimate.cost
    pairs = 0.5 if attention.mask == "causal" else 1.0
    long = 1e6  # rows of a tile whose length costs nothing
    per_pair = float(cost.attention_seconds(1.0, long) + cost.attention_seconds(1.0, long, backward=True)) * pairs
    traffic = estimate.kv_row * (1 + BACKWARD_TRAFFIC) / 2  # each side gets the other's half
    per = estimate.topology.ranks_per_node
    local = traffic / cluster.effective_pair / (per_pair / 2)
    node = traffic / (cluster.nics_per_node * cluster.effective_nic) / (per_pair / (2 * per))
    return Zones(local, max(local, node))
