"""Documents whose heads are split over the ranks of nodes: a part of a plan.

Inside a group, a node or several neighbouring ones, every rank has all of the group's tokens for its own heads; between
groups keys and values travel as if a group were one rank, each rank's heads over its own NIC. So they cross to a node
once, over all NICs, without relays. Over k nodes q, k, v and out cross once each, 1/k of them to each node; keys that
are exchanged between the k nodes cross k - 1 times.
"""

from __future__ import annotations

from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.heads import cut_among_members, head_ranges, held_by_members, spread
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.staged import staged


def node_split_part(
    groups: Layout, groups_kv: Layout, topology: Topology, attention: AttentionConfig, prefetch: int = 1
) -> Plan:
    """The plan of documents placed on groups of neighbouring nodes.

    Args:
        groups, groups_kv: queries and keys over the groups, all of as many nodes, as if each were a rank; one object
            where they are the same.
        topology: the ranks.
        attention: what is computed.
        prefetch: nodes from which keys are on their way while those of one are computed.
    """
    degree = topology.ranks // groups.ranks
    programs = staged(groups, groups_kv, attention, Topology(groups.ranks, 1), False, prefetch)
    if degree == 1:
        return Plan("node_split", attention, topology, groups, groups_kv, groups, groups_kv, *programs)
    ranges, kv_ranges = head_ranges(attention, degree)
    held = cut_among_members(groups, degree)
    held_kv = held if groups_kv is groups else cut_among_members(groups_kv, degree)
    q_layout, kv_layout = held_by_members(groups, ranges), held_by_members(groups_kv, kv_ranges)
    has_heads = ranges[:, 1] > ranges[:, 0]
    forward, backward = (spread(program, q_layout, has_heads) for program in programs)
    return Plan("node_split", attention, topology, held, held_kv, q_layout, kv_layout, forward, backward)
