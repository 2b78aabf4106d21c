"""Documents whose heads are split over the ranks of nodes: a part of a plan.

Inside a node every rank has all of the node's tokens for its own heads; between nodes keys and values travel as if a
node were one rank, each rank's heads over its own NIC. So they cross to a node once, over all NICs, without relays.
"""

from __future__ import annotations

from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.heads import cut_among_members, head_ranges, held_by_members, spread
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.staged import staged


def node_split_part(
    nodes: Layout, nodes_kv: Layout, topology: Topology, attention: AttentionConfig, prefetch: int = 1
) -> Plan:
    """The plan of documents placed on nodes.

    Args:
        nodes, nodes_kv: queries and keys over the nodes, as if each were a rank; one object where they are the same.
        topology: the ranks.
        attention: what is computed.
        prefetch: nodes from which keys are on their way while those of one are computed.
    """
    degree = topology.ranks_per_node
    programs = staged(nodes, nodes_kv, attention, Topology(topology.nodes, 1), False, prefetch)
    if degree == 1:
        return Plan("node_split", attention, topology, nodes, nodes_kv, nodes, nodes_kv, *programs)
    ranges, kv_ranges = head_ranges(attention, degree)
    held = cut_among_members(nodes, degree)
    held_kv = held if nodes_kv is nodes else cut_among_members(nodes_kv, degree)
    q_layout, kv_layout = held_by_members(nodes, ranges), held_by_members(nodes_kv, kv_ranges)
    has_heads = ranges[:, 1] > ranges[:, 0]
    forward, backward = (spread(program, q_layout, has_heads) for program in programs)
    return Plan("node_split", attention, topology, held, held_kv, q_layout, kv_layout, forward, backward)
