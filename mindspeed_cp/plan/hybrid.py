"""Hybrid: heads split inside groups of neighbouring ranks, a ring between the groups; and Ulysses, which has one group.

The caller's layout gives every rank an equal run of its group's rows, so that each move between two members, tokens to
heads and back, is one run of rows.
"""

from __future__ import annotations

from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.config import AttentionConfig, Topology, check_divisor
from mindspeed_cp.plan.heads import cut_among_members, head_ranges, held_by_members, spread
from mindspeed_cp.plan.placement import place
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.ring import ring


def build_hybrid(
    queries: Documents,
    keys: Documents,
    topology: Topology,
    attention: AttentionConfig,
    ulysses_degree: int | None = None,
    layout: str = "zigzag",
) -> Plan:
    """Ulysses in groups of `ulysses_degree` ranks, a ring over the groups.

    Args:
        queries, keys, topology, attention: as for the ring.
        ulysses_degree: ranks in a group; default: the largest divisor of the ranks of a node that is not all ranks.
        layout: of documents over groups, as for the ring.

    Raises:
        ConfigError: the groups do not divide the ranks.
    """
    degree = default_degree(topology, attention.heads) if ulysses_degree is None else ulysses_degree
    check_divisor("ulysses_degree", degree, topology.ranks)
    return heads_split("hybrid", queries, keys, topology, attention, degree, layout)


def default_degree(topology: Topology, heads: int) -> int:
    """The largest divisor of the ranks of a node that is not all of the ranks, nor more than there are heads; 1 for one
    rank."""
    here, ranks = topology.ranks_per_node, topology.ranks
    return max((d for d in range(1, min(here, heads) + 1) if here % d == 0 and d < ranks), default=1)


def heads_split(
    name: str,
    queries: Documents,
    keys: Documents,
    topology: Topology,
    attention: AttentionConfig,
    degree: int,
    layout: str,
) -> Plan:
    """A plan of that name with heads split in groups of `degree` ranks and a ring between the groups."""
    groups, groups_kv = place(layout, queries, keys, topology.ranks // degree, attention)
    ranges, kv_ranges = head_ranges(attention, degree)
    held = cut_among_members(groups, degree)
    held_kv = held if groups_kv is groups else cut_among_members(groups_kv, degree)
    q_layout, kv_layout = held_by_members(groups, ranges), held_by_members(groups_kv, kv_ranges)
    if degree == 1:
        held, held_kv = q_layout, kv_layout = groups, groups_kv
    has_heads = ranges[:, 1] > ranges[:, 0]
    forward, backward = (spread(p, q_layout, has_heads) for p in ring(groups, groups_kv, attention))
    return Plan(name, attention, topology, held, held_kv, q_layout, kv_layout, forward, backward)
