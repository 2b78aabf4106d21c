"""Documents whose heads are split over a few ranks: for these documents a plan, to be a part of a larger one.

The ranks that share a document exchange q, k and v before (tokens to heads) and the output after (heads to tokens);
between the two each computes all of the document's tokens for its own heads, in one step. That is Ulysses (Jacobs et
al. 2023) over any set of ranks, chosen for every document: mostly ranks of one node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.algorithms.head_groups import head_ranges
from mindspeed_cp.layout import TOKEN_SPAN, Documents, Layout
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import CONTENT, Messages


def head_split_part(
    documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    groups: Sequence[Sequence[int] | np.ndarray | None],
    held: Layout,
    held_kv: Layout | None = None,
) -> Plan:
    """A plan that splits the heads of each document over the ranks of its group.

    A rank has one range of heads: documents of groups that give a rank different ranges go to different parts. Where a
    group has more ranks than there are heads, some of its ranks compute nothing of its documents.

    Args:
        documents: all documents of the batch; those of other parts have length 0.
        topology: the context-parallel ranks.
        attention: what is computed.
        groups: for each document the ranks that share it, in the order in which they take heads; not looked at for
            documents of length 0.
        held: who holds which rows of these documents before and after, any layout of them: mostly the group's ranks do.
        held_kv: the same for keys and values; None: `held`.
    """
    keys = held if held_kv is None else held_kv
    ranges, kv_ranges = np.zeros((2, topology.ranks, 2), np.int64)
    used = np.flatnonzero((documents.lengths > 0) | (keys.documents.lengths > 0))
    members: dict[tuple[int, ...], np.ndarray] = {}
    for doc in used.tolist():
        group = tuple(int(rank) for rank in groups[doc])  # type: ignore[union-attr]
        if group in members:
            continue
        own, own_kv = head_ranges(attention, len(group))
        busy = own[:, 1] > own[:, 0]
        members[group] = np.array(group)[busy]
        for rank, heads, kv_heads in zip(members[group].tolist(), own[busy], own_kv[busy], strict=True):
            ranges[rank], kv_ranges[rank] = heads, kv_heads
    owners = [members[tuple(int(rank) for rank in groups[doc])] for doc in used.tolist()]  # type: ignore[union-attr]
    q_layout_compute = _on_members(documents, topology.ranks, used, owners).with_heads(ranges)
    kv_layout_compute = _on_members(keys.documents, topology.ranks, used, owners).with_heads(kv_ranges)
    program = _one_step(q_layout_compute, kv_layout_compute, attention)
    return Plan("head_split", attention, topology, held, keys, q_layout_compute, kv_layout_compute, program, program)


def _on_members(documents: Documents, ranks: int, used: np.ndarray, owners: Sequence[np.ndarray]) -> Layout:
    """Every member of a group has all tokens of the group's documents."""
    size = np.array([len(ranks_of) for ranks_of in owners], np.int64)
    spans = np.empty(int(size.sum()), TOKEN_SPAN)
    spans["rank"] = np.concatenate([*owners, np.zeros(0, np.int64)])
    spans["doc"] = np.repeat(used, size)
    spans["start"], spans["stop"] = documents.offsets[spans["doc"]], documents.offsets[spans["doc"] + 1]
    spans = spans[spans["stop"] > spans["start"]]
    return Layout(documents, ranks, spans[np.lexsort((spans["start"], spans["rank"]))])


def _one_step(q_layout_compute: Layout, kv_layout_compute: Layout, attention: AttentionConfig) -> Program:
    """Every rank computes what it holds."""
    ranks = np.flatnonzero(np.diff(kv_layout_compute.span_offsets))
    contents = np.zeros(len(ranks), CONTENT)
    contents["rank"], contents["first"] = ranks, kv_layout_compute.span_offsets[ranks]
    contents["count"] = np.diff(kv_layout_compute.span_offsets)[ranks]
    return Program(
        1,
        kv_layout_compute.token_counts[:, None],
        q_layout_compute,
        kv_layout_compute.documents,
        attention,
        contents,
        kv_layout_compute.spans,
        Messages.empty(),
        Messages.empty(),
    )
