"""KV fetch in rounds and stages: inside the node first, then node by node, each block over the wire once.

A round is the set of keys and values that ranks fetch inside their node and compute with in one step (under direct:
from one source). A stage is the set of keys and values that ranks fetch from nodes at one distance. There are up to two
rounds (the first and the second halves of documents, so that the first round arrives early), and a stage for each
distance. All keys of a round or stage lie in one slot in token order, so that they make as few tiles as possible. With
routing (:mod:`mindspeed_cp.algorithms.kv_fetch.schedule`) a block crosses to a node once::

    step            0           1           2           3           4
    computes        own         round 1     round 2     stage 1     stage 2
    in the node     round 1     round 2     forward 1   forward 2
    across          stage 1 ..............  ........ stage 2 ...

In the backward a stage's gradients go back by the same way, hop by hop, summed at the relays, and shares of the own
block are kept for the steps in which the last of them travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mindspeed_cp.algorithms.kv_fetch.needs import KvFetches, KvOwners, needed_tokens
from mindspeed_cp.algorithms.kv_fetch.schedule import Schedule, direct_schedule, schedule
from mindspeed_cp.algorithms.split_local_block import LATE_SHARE, local_block_work, split_local_block
from mindspeed_cp.layout import Layout
from mindspeed_cp.layout.runs import concatenate_records
from mindspeed_cp.plan.problem import AttentionConfig, Topology, document_pairs
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import CONTENT, Messages, sorted_contents

#: (step, share of the local block's work), for all ranks or fp64 [ranks].
Shares = Sequence[tuple[int, np.ndarray | float]]


def staged(
    queries: Layout,
    keys: Layout,
    attention: AttentionConfig,
    topology: Topology,
    routing: bool = True,
    prefetch: int = 1,
    beside: np.ndarray | None = None,
    early: np.ndarray | float = 0.0,
) -> tuple[Program, Program]:
    """Return the forward and backward program of a KV fetch.

    Args:
        queries, keys: layouts of queries and of keys.
        attention: attention of one layer.
        topology: which ranks are on one node.
        routing: blocks cross to a node once and are forwarded inside it; else each rank fetches what it needs itself.
        prefetch: stages in flight while one is computed, 1 or more.
        beside: pairs that each rank computes in other parts of the plan, fp64 [ranks]. Without messages the local block
            then comes in two halves, beside which the redistributions of the other parts travel.
        early: share of the local block's work that each rank has time for in the backward before all ranks are there
            with which it computes other parts, fp64 [ranks]; the halves are those of the rest.
    """
    shared = _on_several_ranks(queries) | _on_several_ranks(keys)
    needs = needed_tokens(queries, keys, attention, shared[queries.spans["doc"]])
    held = KvOwners.of(keys, shared[keys.spans["doc"]])
    times = schedule(needs, held, keys, topology, routing, prefetch)
    own_pairs = local_block_work(queries, keys, attention)
    total_pairs = document_pairs(queries.documents, keys.documents, attention).sum()
    if beside is not None:
        total_pairs += beside.sum()
    late = np.minimum(0.5, LATE_SHARE * total_pairs / topology.ranks / np.maximum(own_pairs, 1.0))
    steps, last = times.steps, times.last
    shares: Shares = [(0, 1 - late), *((step, late / (last + 1 - steps)) for step in range(steps, last + 1))]
    if beside is None:
        return _programs(queries, keys, attention, times, shares, [(0, 1.0)])
    half = np.where(beside > 0, 0.5, 0.0)  # ranks without other parts have nothing to hide
    alone, alone_backward = ([(0, 1 - later), (1, later)] for later in (half, half * (1 - early)))
    return _programs(queries, keys, attention, times, shares, alone, alone_backward)


def direct_fetch_programs(
    queries: Layout, keys: Layout, attention: AttentionConfig, round_of: np.ndarray, prefetch: int
) -> tuple[Program, Program]:
    """Return the forward and backward program in which every rank fetches what it needs from each owner.

    Round g is computed in step g + 1; its gradients leave for their owners in the step after. In the backward half of
    the local block waits for the last step, in which the last gradients return::

        step         0           1           2           3
        computes     own         round 0     round 1     round 2
        receives     round 0     round 1     round 2                 (prefetch 1)
        returns                              round 0     round 1

    Args:
        queries, keys: layouts of queries and of keys on the same ranks.
        attention: attention of one layer.
        round_of: round in which rank r fetches from rank (r - offset) mod ranks, int64 [ranks], by offset; entry 0 is
            not used. Rounds that bring nothing to any rank are left out.
        prefetch: rounds in flight while one is computed, 1 or more; slots are one more.
    """
    fetches = KvOwners.of(keys).fetch_list(needed_tokens(queries, keys, attention))
    fetches = fetches[fetches.src != fetches.dst]
    number = round_of[fetches.dst - fetches.src]  # of a negative offset: counted from the end
    order = np.argsort(fetches.dst * (int(number.max(initial=0)) + 1) + number, kind="stable")
    return programs_of_rounds(queries, keys, attention, replace(fetches, stage=number)[order].packed(), prefetch)


def programs_of_rounds(
    queries: Layout, keys: Layout, attention: AttentionConfig, fetches: KvFetches, prefetch: int
) -> tuple[Program, Program]:
    """Return the forward and backward program of fetches from owners in any rounds, as `direct_fetch_programs`.

    Args:
        queries, keys, attention, prefetch: as there.
        fetches: all that ranks need of others, packed; stage is the round.
    """
    times = direct_schedule(fetches, prefetch)
    return _programs(queries, keys, attention, times, [(0, 0.5), (times.last, 0.5)], [(0, 1.0)])


def _programs(
    queries: Layout,
    keys: Layout,
    attention: AttentionConfig,
    times: Schedule,
    shares: Shares,
    alone: Shares,
    alone_backward: Shares | None = None,
) -> tuple[Program, Program]:
    """Return the programs of a schedule.

    Args:
        queries, keys: layouts of queries and of keys.
        attention: attention of one layer.
        times: steps and slots of what is fetched.
        shares: shares of the local block in the steps of the backward.
        alone: shares of the local block in the steps of both programs if nothing is fetched; of the forward alone if
        alone_backward: are those of the backward.
    """
    contents, spans = _slot_contents(keys, times)
    capacity = np.zeros((keys.ranks, 1 + max(int(hop.dst_slot.max(initial=0)) for hop in times.hops)), np.int64)
    capacity[:, 0] = keys.token_counts
    for hop in times.hops:
        fetches = hop.fetches[hop.fetches.slot_ends - 1] if len(hop.fetches) else hop.fetches  # the last of each slot
        slot = hop.dst_slot[fetches.stage]
        np.maximum.at(capacity, (fetches.dst, slot), fetches.dst_row + fetches.rows)
    fetch, reduce = (_in_global_order(lists) for lists in zip(*(hop.messages() for hop in times.hops), strict=True))
    steps = times.steps if len(fetch) else alone[-1][0] + 1
    whole = Program(steps, capacity, queries, keys.documents, attention, contents, spans, fetch, Messages.empty())
    if not len(fetch):
        forward = _with_shares(whole, keys, alone)
        return forward, forward if alone_backward is None else _with_shares(whole, keys, alone_backward)
    return whole, replace(_with_shares(whole, keys, shares), steps=times.last + 1, reduce=reduce)


def _with_shares(program: Program, keys: Layout, shares: Shares) -> Program:
    """Return a program whose local blocks, which it computes in one step, are computed in shares."""
    if len(shares) == 1:
        return program
    queries, attention = program.q_layout_compute, program.attention
    contents, spans = split_local_block(queries, keys, attention, program.contents, program.spans, shares)
    return replace(program, contents=contents, spans=spans)


def _in_global_order(lists: tuple[Messages, ...]) -> Messages:
    """Concatenate lists of messages, in global order."""
    items = concatenate_records([messages.items for messages in lists])
    counts = [len(messages.runs) for messages in lists]
    items["first"] += np.repeat(np.cumsum(counts) - counts, [len(messages) for messages in lists])
    return Messages(items, concatenate_records([messages.runs for messages in lists])).in_global_order()


def _slot_contents(keys: Layout, times: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Return the contents of all slots, local blocks first, and the spans that they refer to."""
    local = np.zeros(keys.ranks, CONTENT)
    local["rank"], local["first"] = np.arange(keys.ranks), keys.span_offsets[:-1]
    local["count"] = np.diff(keys.span_offsets)
    spans, contents, total = [keys.spans], [local[local["count"] > 0]], len(keys.spans)
    for buffer in times.buffers:
        fetches = buffer.fetches
        first = fetches.slot_begins
        received, stage = np.zeros(len(first), CONTENT), fetches.stage[first]
        received["rank"], received["step"] = fetches.dst[first], buffer.step[stage]
        received["slot"] = buffer.slot[stage]
        received["first"], received["count"] = total + first, fetches.slot_ends - first
        spans.append(fetches.spans_of(fetches.dst))
        total += len(fetches)
        if buffer.needed is not None and len(first):
            received = received[np.logical_or.reduceat(buffer.needed, first)]
        contents.append(received)
    return sorted_contents(concatenate_records(contents)), concatenate_records(spans)


def _on_several_ranks(layout: Layout) -> np.ndarray:
    """Return True for documents that more than one rank holds, in trees for all of a tree that more than one rank
    holds, bool [documents]."""
    spans, none, root = layout.spans, layout.ranks, layout.documents.roots
    low, high = np.full(len(layout.documents), none), np.full(len(layout.documents), -1)
    np.minimum.at(low, root[spans["doc"]], spans["rank"])
    np.maximum.at(high, root[spans["doc"]], spans["rank"])
    return (high > low)[root]
