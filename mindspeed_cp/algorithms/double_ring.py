"""The double ring: rings inside windows of ranks, and blocks that travel from window to window behind them.

The ranks are M windows (for example nodes) of W ranks. In outer step t, rank i of window g begins with the block of
rank i of window g - t. In the W inner steps the window passes its W blocks round, as a ring does. Meanwhile, during
all W inner steps, each rank sends the block with which it began to rank i of window g + 1, for the next outer step. A
transfer between windows may thus take W times as long as one inside::

    outer step      0                   1                   2
    inner steps     s = 0 .. W-1        0 .. W-1            0 .. W-1
    window g has    blocks of g         of g - 1            of g - 2
    and sends on    those of g          of g - 1

In the backward, the gradient of a block follows it through the window one step behind. It has the part of every rank
of the window when the block is computed last there, at rank i - 1. The sum goes from there to rank i - 1 of the next
window while that window passes the block round, is added to that window's sum, and in the end goes to the owner.

Slots: 0 local block; 1, 2 blocks from the previous window (by outer step); 3, 4 blocks inside the window (by step); 5,
6 blocks of the last inner step (by outer step), whose gradients still leave during the next outer step. (Liu et al.
2023 for the ring; Gu et al. 2024, LoongTrain, for two levels.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from mindspeed_cp.algorithms.kv_blocks import KvBlocks, message_records, visible_blocks
from mindspeed_cp.algorithms.layouts import LayoutName, build_layouts
from mindspeed_cp.algorithms.options import DividesRanks
from mindspeed_cp.algorithms.split_local_block import split_local_block
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages, sorted_contents

OUTER_SLOT, INNER_SLOT, LAST_SLOT = 1, 3, 5


@dataclass(frozen=True, eq=False)
class _Route:
    """Blocks that are computed in each step: entry by entry, block `block` in inner step `inner` of outer step `outer`;
    int64 [entries]."""

    window: int
    outer_steps: int
    inner_steps: int
    outer: np.ndarray
    inner: np.ndarray
    block: np.ndarray
    ranks: int

    @staticmethod
    def of(blocks: KvBlocks, visible: np.ndarray, window: int) -> _Route:
        """Return the route of the blocks that travel and of all local blocks. Outer and inner steps after which no rank
        sees any block are left out."""
        ranks, (rank, block) = len(visible), np.nonzero(visible)
        outer_steps = int(((rank // window - block // window) % (ranks // window)).max(initial=0)) + 1
        inner_steps = int(((rank - block) % window).max(initial=0)) + 1
        grid = np.meshgrid(np.arange(outer_steps), np.arange(inner_steps), np.arange(ranks), indexing="ij")
        outer, inner, block = (axis.ravel() for axis in grid)
        kept = (blocks.rows[block] > 0) | ((outer == 0) & (inner == 0))
        return _Route(window, outer_steps, inner_steps, outer[kept], inner[kept], block[kept], ranks)

    @property
    def step(self) -> np.ndarray:
        return self.outer * self.inner_steps + self.inner

    def rank(self, outer: int = 0, inner: int = 0) -> np.ndarray:
        """Return the rank that has the block, or has it `outer` outer steps and `inner` inner steps later."""
        window = self.block // self.window + self.outer + outer
        member = (self.block + self.inner + inner) % self.window
        return window * self.window % self.ranks + member

    def slots(self, keeps_last: bool) -> np.ndarray:
        """Return the slot of the block. The forward needs no slot for the last inner step: nothing leaves it then."""
        slot = INNER_SLOT + self.inner % 2
        if keeps_last:
            slot = np.where(self.inner == self.inner_steps - 1, LAST_SLOT + self.outer % 2, slot)
        return np.where(self.inner == 0, np.where(self.outer == 0, 0, OUTER_SLOT + self.outer % 2), slot)


def _forward(blocks: KvBlocks, route: _Route, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray, Messages]:
    """Return contents, capacities and fetches."""
    outer, inner, block, step, rank = route.outer, route.inner, route.block, route.step, route.rank()
    contents = sorted_contents(blocks.contents(step, rank, slot, block))
    capacity = np.zeros((route.ranks, 7), np.int64)
    np.maximum.at(capacity, (rank, slot), blocks.rows[block])
    capacity[:, 0] = blocks.kv_layout.token_counts

    slot_at = np.full((route.outer_steps, route.inner_steps, route.ranks), -1)
    slot_at[outer, inner, block] = slot
    x = np.flatnonzero((inner + 1 < route.inner_steps) & (blocks.rows[block] > 0))
    next_slot = slot_at[outer[x], inner[x] + 1, block[x]]
    inside = message_records(step[x], step[x], rank[x], route.rank(inner=1)[x], slot[x], next_slot)
    o = np.flatnonzero((inner == 0) & (outer + 1 < route.outer_steps))
    done, next_slot = step[o] + route.inner_steps - 1, OUTER_SLOT + (outer[o] + 1) % 2
    across = message_records(step[o], done, rank[o], route.rank(outer=1)[o], slot[o], next_slot)
    return contents, capacity, blocks.messages(np.concatenate([inside, across]), np.concatenate([block[x], block[o]]))


def _gradients(blocks: KvBlocks, route: _Route, slot: np.ndarray) -> Messages:
    """Return the reduces: gradients follow their blocks one step behind inside a window; the sum of a window goes to
    the rank of the next one that computes the block last, or to the owner."""
    outer, inner, block, step, rank = route.outer, route.inner, route.block, route.step, route.rank()
    inner_steps = route.inner_steps
    r = np.flatnonzero((step > 0) & (inner + 1 < inner_steps))
    next_slot = np.where(inner + 2 == inner_steps, LAST_SLOT + outer % 2, INNER_SLOT + (inner + 1) % 2)[r]
    inside = message_records(step[r] + 1, step[r] + 1, rank[r], route.rank(inner=1)[r], slot[r], next_slot)
    f = np.flatnonzero((step > 0) & (inner + 1 == inner_steps))
    to_owner = outer[f] + 1 == route.outer_steps
    target = np.where(to_owner, block[f], route.rank(outer=1)[f])
    last_slot = (LAST_SLOT if inner_steps > 1 else OUTER_SLOT) + (outer[f] + 1) % 2
    done = step[f] + np.where(to_owner, 1, inner_steps)
    onward = message_records(step[f] + 1, done, rank[f], target, slot[f], np.where(to_owner, 0, last_slot))
    return blocks.messages(np.concatenate([inside, onward]), np.concatenate([block[r], block[f]]))


def build_double_ring(
    documents: Documents,
    kv_documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    *,
    cp_window_size: Annotated[int | None, DividesRanks()] = None,
    layout: LayoutName = "zigzag",
) -> Plan:
    """Inner rings in windows of ranks, an outer ring over the windows.

    Args:
        documents, kv_documents, topology, attention: as for :func:`mindspeed_cp.build_plan`.
        cp_window_size: ranks of a window; default: the ranks of a node.
        layout: "zigzag" (balanced under a causal mask), "contiguous" (balanced under a full mask, few messages under a
            window), or "balanced" (short documents stay whole).
    """
    window = topology.ranks_per_node if cp_window_size is None else cp_window_size
    queries, keys = build_layouts(layout, documents, kv_documents, topology.ranks, attention)
    blocks = KvBlocks.trimmed(queries, keys, attention)
    route = _Route.of(blocks, visible_blocks(queries, keys, attention), window)
    steps, spans = route.outer_steps * route.inner_steps, blocks.spans
    contents, capacity, fetch = _forward(blocks, route, route.slots(keeps_last=False))
    forward = Program(steps, capacity, queries, keys.documents, attention, contents, spans, fetch, Messages.empty())
    slot = route.slots(keeps_last=True)
    contents, capacity, fetch = _forward(blocks, route, slot)
    reduce, backward = _gradients(blocks, route, slot), forward
    if len(reduce):
        halves = [(0, 0.5), (steps, 0.5)]
        contents, spans = split_local_block(queries, keys, attention, contents, spans, halves)
        backward = Program(steps + 1, capacity, queries, keys.documents, attention, contents, spans, fetch, reduce)
    return Plan("double_ring", attention, topology, queries, keys, queries, keys, forward, backward)
