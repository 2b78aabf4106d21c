"""The ring: blocks of keys and values travel one rank per step, through two receive buffers that take turns.

In step s, rank r of n computes with the block of rank (r - s) mod n, sends that block on to r + 1, and receives the
next one from r - 1 at the same time. In the backward the gradient of a block follows it one step behind, collects the
part of every rank on its way, and ends at its owner::

    step           0        1        2        3        4
    rank r holds   r        r-1      r-2      r-3                   (4 ranks)
    sends on       K,V      K,V      K,V
    and            .        .        dK,dV    dK,dV    dK,dV        of the block computed one step before

Rows that no other rank sees do not travel: under a causal mask, the second chunks of rank 0, which are half of its
block. A block stops after the last rank that sees any of it; its gradient then goes to the owner in one message.

In the backward, half of a rank's local block is computed in step 0, while the first block arrives, and half in the last
step, in which the last gradients return.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.algorithms.kv_blocks import KvBlocks, message_records, visible_blocks
from mindspeed_cp.algorithms.layouts import LayoutName, build_layouts
from mindspeed_cp.algorithms.split_local_block import split_local_block
from mindspeed_cp.layout import Documents, Layout
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages, sorted_contents


def ring_programs(queries: Layout, keys: Layout, attention: AttentionConfig) -> tuple[Program, Program]:
    """Return the forward and backward program of one ring over all ranks, an even or odd number.

    Args:
        queries: layout of queries.
        keys: layout of keys and values on the same ranks.
        attention: attention of one layer.
    """
    ranks = keys.ranks
    blocks = KvBlocks.trimmed(queries, keys, attention)
    hops = (np.arange(ranks)[:, None] - np.arange(ranks)[None, :]) % ranks  # from the owner, [rank, block]
    last_hop = np.where(visible_blocks(queries, keys, attention), hops, 0).max(axis=0)  # of each block

    hop, block = np.divmod(np.arange(ranks * ranks), ranks)
    present = (hop <= last_hop[block]) & ((blocks.rows[block] > 0) | (hop == 0))
    hop, block = hop[present], block[present]  # in step `hop`, `rank` computes with the block in `slot`
    rank, next_rank = (block + hop) % ranks, (block + hop + 1) % ranks
    slot, next_slot = np.where(hop == 0, 0, 1 + (hop - 1) % 2), 1 + hop % 2
    is_last = hop == last_hop[block]

    contents = sorted_contents(blocks.contents(hop, rank, slot, block))
    capacity = np.zeros((ranks, 3), np.int64)
    np.maximum.at(capacity, (rank, slot), blocks.rows[block])
    capacity[:, 0] = keys.token_counts

    sends = message_records(hop, hop, rank, next_rank, slot, next_slot)
    fetch = blocks.messages(sends[~is_last], block[~is_last])
    target, target_slot = np.where(is_last, block, next_rank), np.where(is_last, 0, next_slot)
    returns = message_records(hop + 1, hop + 1, rank, target, slot, target_slot)
    reduce = blocks.messages(returns[hop > 0], block[hop > 0])

    forward_steps = int(contents["step"].max()) + 1 if len(contents) else 1
    backward_steps = max(forward_steps, int(reduce.items["done"].max()) + 1 if len(reduce) else 0)
    documents, spans = keys.documents, blocks.spans
    forward = Program(forward_steps, capacity, queries, documents, attention, contents, spans, fetch, Messages.empty())
    if len(reduce):
        halves = [(0, 0.5), (backward_steps - 1, 0.5)]
        contents, spans = split_local_block(queries, keys, attention, contents, spans, halves)
    backward = Program(backward_steps, capacity, queries, documents, attention, contents, spans, fetch, reduce)
    return forward, backward


def build_ring(
    documents: Documents,
    kv_documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    *,
    layout: LayoutName = "zigzag",
) -> Plan:
    """One ring over all ranks.

    Args:
        documents, kv_documents, topology, attention: as for :func:`mindspeed_cp.build_plan`.
        layout: "zigzag" (balanced under a causal mask), "contiguous" (balanced under a full mask, few messages under a
            window), or "balanced" (short documents stay whole)
    """
    layouts = build_layouts(layout, documents, kv_documents, topology.ranks, attention)
    return Plan("ring", attention, topology, *layouts, *layouts, *ring_programs(*layouts, attention))
