"""Plans in which the ranks of a group split the heads: each rank computes some heads of all tokens of its group.

Between groups keys and values travel as if a group were one rank, each rank's heads over its own NIC. So they cross to
a node once, over all NICs, without relays. The caller's layout gives every rank an equal run of its group's rows, so
that each message of the redistribution is one run of rows.
"""

from __future__ import annotations

from mindspeed_cp.algorithms.kv_fetch.programs import staged
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.heads import (
    head_ranges,
    split_heads_over_group,
    split_program_over_group,
    split_tokens_over_group,
)
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan, Program


def head_groups_plan(
    name: str,
    groups: Layout,
    kv_groups: Layout,
    topology: Topology,
    attention: AttentionConfig,
    programs: tuple[Program, Program],
) -> Plan:
    """Return the plan in which every rank of a group runs the programs of its group for its own heads.

    Args:
        name: name of the plan.
        groups, kv_groups: layouts of queries and keys over the groups, as if each were a rank; the same object in
            self-attention.
        topology: context-parallel ranks; groups are of neighbouring ranks.
        attention: attention of one layer, all heads.
        programs: forward and backward program over the groups.
    """
    degree = topology.ranks // groups.ranks
    if degree == 1:
        return Plan(name, attention, topology, groups, kv_groups, groups, kv_groups, *programs)
    ranges, kv_ranges = head_ranges(attention, degree)
    layout = split_tokens_over_group(groups, degree)
    kv_layout = layout if kv_groups is groups else split_tokens_over_group(kv_groups, degree)
    q_layout = split_heads_over_group(groups, ranges)
    has_heads = ranges[:, 1] > ranges[:, 0]
    forward, backward = (split_program_over_group(program, q_layout, has_heads) for program in programs)
    return Plan(
        name, attention, topology, layout, kv_layout, q_layout, split_heads_over_group(kv_groups, kv_ranges), forward,
        backward,
    )  # fmt: skip


def head_groups_part(
    groups: Layout, kv_groups: Layout, topology: Topology, attention: AttentionConfig, prefetch: int = 1
) -> Plan:
    """Return the plan of documents whose heads are split over groups of neighbouring nodes.

    Over k nodes q, k, v and out cross once each, 1/k of them to each node; keys that the k groups fetch from each other
    cross k - 1 times.

    Args:
        groups, kv_groups, topology, attention: as in :func:`head_groups_plan`.
        prefetch: groups whose keys are in flight while those of one are computed.
    """
    programs = staged(groups, kv_groups, attention, Topology(groups.ranks, 1), False, prefetch)
    return head_groups_plan("node_split", groups, kv_groups, topology, attention, programs)
