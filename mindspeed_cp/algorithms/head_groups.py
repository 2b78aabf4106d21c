"""Plans in which the ranks of a group split the heads: each rank computes some heads of all tokens of its group.

Used by Ulysses, the hybrid and the head-split parts of hierarchical (Jacobs et al. 2023; Fang and Zhao 2024). Between
groups of neighbouring ranks keys and values travel as if a group were one rank, each rank's heads over its own NIC. So
they cross to a node once, over all NICs, without relays. The caller's layout gives every rank an equal run of its
group's rows, so that each message of the redistribution is one run of rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mindspeed_cp.algorithms.kv_fetch.programs import staged
from mindspeed_cp.layout import Layout, ragged_arange
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages, sorted_contents


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


def head_groups_part(groups: Layout, kv_groups: Layout, topology: Topology, attention: AttentionConfig) -> Plan:
    """Return the plan of documents whose heads are split over groups of neighbouring nodes.

    Over k nodes q, k, v and out cross once each, 1/k of them to each node; keys that the k groups fetch from each other
    cross k - 1 times.

    Args:
        groups, kv_groups, topology, attention: as in :func:`head_groups_plan`.
    """
    programs = staged(groups, kv_groups, attention, Topology(groups.ranks, 1), routing=False)
    return head_groups_plan("node_split", groups, kv_groups, topology, attention, programs)


def head_ranges(attention: AttentionConfig, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the query heads and kv heads of each of `degree` ranks, int64 [degree, 2] each.

    Query heads are split in order and evenly: the counts of two ranks differ by at most one. A rank has exactly the kv
    heads that its query heads read. Ranks beyond the number of heads have none.
    """
    shared = attention.heads // attention.kv_row.heads
    edges = np.arange(degree + 1) * attention.heads // degree
    first, last = edges[:-1], edges[1:]
    kv_last = np.where(last > first, -(-last // shared), first // shared)
    return np.stack([first, last], 1), np.stack([first // shared, kv_last], 1)


def split_tokens_over_group(groups: Layout, degree: int) -> Layout:
    """Split the rows of each group, in token order, into `degree` equal runs (to one row), one for each member.

    This is the layout before the all-to-all; rows between any two members are then one run.
    """
    counts = groups.token_counts
    ranks = groups.ranks * degree
    group, member = np.divmod(np.arange(ranks), degree)
    low, high = member * counts[group] // degree, (member + 1) * counts[group] // degree
    span = _group_spans(groups, degree)
    rank = np.repeat(np.arange(ranks), np.repeat(np.diff(groups.span_offsets), degree))
    first_row, out = groups.span_first_rows[span], groups.spans[span]
    out["rank"] = rank
    start = out["start"].copy()
    out["start"] += np.maximum(low[rank] - first_row, 0)
    out["stop"] = np.minimum(out["stop"], start + high[rank] - first_row)
    return Layout(groups.documents, ranks, out[out["stop"] > out["start"]])


def split_heads_over_group(groups: Layout, ranges: np.ndarray) -> Layout:
    """Give every member all rows of its group for its own range of heads: the layout after the all-to-all."""
    degree = len(ranges)
    out = groups.spans[_group_spans(groups, degree)]
    out["rank"] = np.repeat(np.arange(groups.ranks * degree), np.repeat(np.diff(groups.span_offsets), degree))
    return Layout(groups.documents, groups.ranks * degree, out).with_heads(np.tile(ranges, (groups.ranks, 1)))


def _group_spans(groups: Layout, degree: int) -> np.ndarray:
    """Return the span indices of each member's group, member after member."""
    sizes = np.repeat(np.diff(groups.span_offsets), degree)
    return ragged_arange(np.repeat(groups.span_offsets[:-1], degree), sizes)


def split_program_over_group(program: Program, queries: Layout, has_heads: np.ndarray) -> Program:
    """Turn a program of groups into a program of their members; each member does, for its heads, what its group does.

    Args:
        program: program whose ranks are the groups.
        queries: layout of the queries over the members.
        has_heads: bool [degree]; members without heads neither compute nor send.
    """
    degree = len(has_heads)
    members = np.flatnonzero(has_heads)
    contents = np.repeat(program.contents, len(members))
    contents["rank"] = contents["rank"] * degree + np.tile(members, len(program.contents))
    capacity = np.repeat(program.capacity, degree, axis=0)
    capacity[~np.tile(has_heads, program.ranks), 1:] = 0
    return replace(
        program,
        capacity=capacity,
        q_layout_compute=queries,
        contents=sorted_contents(contents),
        fetch=_messages_of_members(program.fetch, degree, members),
        reduce=_messages_of_members(program.reduce, degree, members),
    )


def _messages_of_members(messages: Messages, degree: int, members: np.ndarray) -> Messages:
    """Repeat every message for each member, in the same order."""
    items = np.repeat(messages.items, len(members))
    for end in ("src", "dst"):
        items[end] = items[end] * degree + np.tile(members, len(messages.items))
    return Messages(items, messages.runs)
