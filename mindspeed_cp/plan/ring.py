"""The ring: blocks of keys and values travel one rank per step, through two receive buffers in turn.

Rank r of n, step s: computes against the block of rank (r - s) mod n, sends that block on to r + 1 and receives the
next one from r - 1 at the same time. In the backward the gradient of a block follows it one step behind, collecting
every rank's part on its way, and so ends at its owner::

    step           0        1        2        3        4
    rank r holds   r        r-1      r-2      r-3                   (4 ranks)
    sends on       K,V      K,V      K,V
    and            .        .        dK,dV    dK,dV    dK,dV        of the block computed one step before

What no other rank sees stays at home: under a causal mask the second chunks of rank 0, which is half of its block. A
block stops travelling after the last rank that sees any of it; its gradient then goes to the owner in one message.

In the backward, half of a rank's own block is computed in step 0, while the first block comes in, and half in the last
step, in which the last gradients travel home.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Documents, Layout
from mindspeed_cp.plan.blocks import Blocks, moves
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.halves import own_block_in_two_halves
from mindspeed_cp.plan.placement import place
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages, sorted_contents
from mindspeed_cp.plan.visibility import sees


def ring(queries: Layout, keys: Layout, attention: AttentionConfig) -> tuple[Program, Program]:
    """Forward and backward program of one ring over all ranks, any number of them (odd ones too).

    Args:
        queries: where queries are.
        keys: where keys and values are; the same ranks.
        attention: what is computed.
    """
    n = keys.ranks
    blocks = Blocks.seen_by_others(queries, keys, attention)
    hops = (np.arange(n)[:, None] - np.arange(n)[None, :]) % n
    last = np.where(sees(queries, keys, attention), hops, 0).max(axis=0)  # hops after which no rank sees the block

    hop, block = np.divmod(np.arange(n * n), n)  # block b is at rank b + hop in step `hop`
    at, after = (block + hop) % n, (block + hop + 1) % n
    slot, next_slot = np.where(hop == 0, 0, 1 + (hop - 1) % 2), 1 + hop % 2
    present = (hop <= last[block]) & ((blocks.rows[block] > 0) | (hop == 0))

    p = np.flatnonzero(present)
    contents = sorted_contents(blocks.contents(hop[p], at[p], slot[p], block[p]))
    capacity = np.zeros((n, 3), np.int64)
    np.maximum.at(capacity, (at[p], slot[p]), blocks.rows[block[p]])
    capacity[:, 0] = keys.token_counts

    t = np.flatnonzero(present & (hop < last[block]))
    fetch = blocks.messages(moves(hop[t], hop[t], at[t], after[t], slot[t], next_slot[t]), block[t])
    m = np.flatnonzero(present & (hop > 0))
    home = hop[m] == last[block[m]]
    to, to_slot = np.where(home, block[m], after[m]), np.where(home, 0, next_slot[m])
    reduce = blocks.messages(moves(hop[m] + 1, hop[m] + 1, at[m], to, slot[m], to_slot), block[m])

    forward_steps = int(contents["step"].max()) + 1 if len(contents) else 1
    backward_steps = max(forward_steps, int(reduce.items["done"].max()) + 1 if len(reduce) else 0)
    documents, spans = keys.documents, blocks.spans
    forward = Program(forward_steps, capacity, queries, documents, attention, contents, spans, fetch, Messages.none())
    if len(reduce):
        contents, spans = own_block_in_two_halves(queries, keys, attention, contents, spans, backward_steps - 1)
    backward = Program(backward_steps, capacity, queries, documents, attention, contents, spans, fetch, reduce)
    return forward, backward


def build_ring(
    queries: Documents, keys: Documents, topology: Topology, attention: AttentionConfig, layout: str = "zigzag"
) -> Plan:
    """One ring over all ranks.

    Args:
        queries: lengths of the queries.
        keys: lengths of the keys.
        topology: where it runs.
        attention: what is computed.
        layout: "zigzag" (balanced under a causal mask), "contiguous" (balanced under a full mask, and short for
            windows), or "balanced" (short documents whole).
    """
    held, held_kv = place(layout, queries, keys, topology.ranks, attention)
    return Plan("ring", attention, topology, held, held_kv, held, held_kv, *ring(held, held_kv, attention))
