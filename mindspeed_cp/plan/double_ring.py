"""The double ring: rings inside windows of ranks, and blocks that hop from window to window behind them.

The ranks are W x M: M windows (nodes, say) of W ranks. Rank i of window g starts outer turn t with the block of rank i
of window g - t. In the W inner steps of the turn the window passes its W blocks round, as a ring does; in the same
time, all W steps of it, each rank sends the block with which it started to rank i of window g + 1, for the next turn. A
transfer between windows may so take W times as long as one inside::

    turn            0                   1                   2
    inner steps     s = 0 .. W-1        0 .. W-1            0 .. W-1
    window g has    blocks of g         of g - 1            of g - 2
    and sends on    those of g          of g - 1

Gradients, in the backward: one follows its block through a window, one step behind, and has the part of every rank of
it when the block is last computed, at rank i - 1 of the window. Its sum goes from there to rank i - 1 of the next
window while that one passes the block round, is added to that window's sum, and in the end goes to the owner.

Slots: 0 own; 1, 2 blocks from the window before (by turn); 3, 4 blocks inside the window (by step); 5, 6 the block of a
turn's last inner step (by turn), whose gradient still leaves while the next turn runs. (Liu et al. 2023 for the ring;
Gu et al. 2024, LoongTrain, for two levels.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.layout import Documents, Layout
from mindspeed_cp.plan.blocks import Blocks, moves
from mindspeed_cp.plan.config import AttentionConfig, Topology, check_divisor
from mindspeed_cp.plan.halves import own_block_in_two_halves
from mindspeed_cp.plan.placement import place
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages, sorted_contents
from mindspeed_cp.plan.visibility import sees

OUTER, INNER, FINAL = 1, 3, 5


def double_ring(queries: Layout, keys: Layout, attention: AttentionConfig, window: int) -> tuple[Program, Program]:
    """Forward and backward program.

    Args:
        queries: where queries are.
        keys: where keys and values are; the same ranks.
        attention: what is computed.
        window: ranks in a window, a divisor of the ranks.
    """
    blocks = Blocks.seen_by_others(queries, keys, attention)
    walk = _Walk.of(blocks, sees(queries, keys, attention), window)
    steps = walk.turns * walk.inner
    contents, capacity, fetch = _forward(blocks, walk, walk.slots(keep_final=False))
    documents, spans = keys.documents, blocks.spans
    forward = Program(steps, capacity, queries, documents, attention, contents, spans, fetch, Messages.none())
    slot = walk.slots(keep_final=True)
    contents, capacity, fetch = _forward(blocks, walk, slot)
    reduce = _gradients(blocks, walk, slot)
    if not len(reduce):
        return forward, forward
    contents, spans = own_block_in_two_halves(queries, keys, attention, contents, spans, steps)
    return forward, Program(steps + 1, capacity, queries, documents, attention, contents, spans, fetch, reduce)


@dataclass(frozen=True, eq=False)
class _Walk:
    """Which block is where: entry by entry, in inner step `s` of turn `t` (step `step` in all) block `b` is
    computed."""

    window: int
    turns: int
    inner: int
    t: np.ndarray
    s: np.ndarray
    b: np.ndarray
    ranks: int

    @staticmethod
    def of(blocks: Blocks, seen: np.ndarray, window: int) -> _Walk:
        """Of the blocks that travel, and of every own block; turns and inner steps after which no rank sees any block
        further on are left out."""
        n, (rank, block) = len(seen), np.nonzero(seen)
        turns = int(((rank // window - block // window) % (n // window)).max(initial=0)) + 1
        inner = int(((rank - block) % window).max(initial=0)) + 1
        t, s, b = (x.ravel() for x in np.meshgrid(np.arange(turns), np.arange(inner), np.arange(n), indexing="ij"))
        kept = (blocks.rows[b] > 0) | ((t == 0) & (s == 0))
        return _Walk(window, turns, inner, t[kept], s[kept], b[kept], n)

    @property
    def step(self) -> np.ndarray:
        return self.t * self.inner + self.s

    def rank(self, turn: int = 0, step: int = 0) -> np.ndarray:
        """The rank that has the block, or has it `turn` turns and `step` inner steps later."""
        window, place = self.b // self.window + self.t + turn, (self.b + self.s + step) % self.window
        return window * self.window % self.ranks + place

    def slots(self, keep_final: bool) -> np.ndarray:
        """Slot of the block. The forward needs no slot for the last inner step alone: nothing leaves it."""
        slot = INNER + self.s % 2
        if keep_final:
            slot = np.where(self.s == self.inner - 1, FINAL + self.t % 2, slot)
        return np.where(self.s == 0, np.where(self.t == 0, 0, OUTER + self.t % 2), slot)


def _forward(blocks: Blocks, walk: _Walk, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray, Messages]:
    """Contents, capacities and fetches."""
    t, s, b, step, at = walk.t, walk.s, walk.b, walk.step, walk.rank()
    contents = sorted_contents(blocks.contents(step, at, slot, b))
    capacity = np.zeros((walk.ranks, 7), np.int64)
    np.maximum.at(capacity, (at, slot), blocks.rows[b])
    capacity[:, 0] = blocks.keys.token_counts

    place = np.full((walk.turns, walk.inner, walk.ranks), -1)
    place[t, s, b] = slot
    x = np.flatnonzero((s + 1 < walk.inner) & (blocks.rows[b] > 0))
    inside = moves(step[x], step[x], at[x], walk.rank(step=1)[x], slot[x], place[t[x], s[x] + 1, b[x]])
    o = np.flatnonzero((s == 0) & (t + 1 < walk.turns))
    done = step[o] + walk.inner - 1
    across = moves(step[o], done, at[o], walk.rank(turn=1)[o], slot[o], OUTER + (t[o] + 1) % 2)
    return contents, capacity, blocks.messages(np.concatenate([inside, across]), np.concatenate([b[x], b[o]]))


def _gradients(blocks: Blocks, walk: _Walk, slot: np.ndarray) -> Messages:
    """Gradients follow their blocks one step behind inside a window; the sum of a window goes to where the next one
    computes the block last, or home."""
    t, s, b, step, at = walk.t, walk.s, walk.b, walk.step, walk.rank()
    inner = walk.inner
    r = np.flatnonzero((step > 0) & (s + 1 < inner))
    following = np.where(s + 2 == inner, FINAL + t % 2, INNER + (s + 1) % 2)
    inside = moves(step[r] + 1, step[r] + 1, at[r], walk.rank(step=1)[r], slot[r], following[r])
    f = np.flatnonzero((step > 0) & (s + 1 == inner))
    home = t[f] + 1 == walk.turns
    to = np.where(home, b[f], walk.rank(turn=1)[f])
    to_slot = np.where(home, 0, (FINAL if inner > 1 else OUTER) + (t[f] + 1) % 2)
    onward = moves(step[f] + 1, step[f] + np.where(home, 1, inner), at[f], to, slot[f], to_slot)
    return blocks.messages(np.concatenate([inside, onward]), np.concatenate([b[r], b[f]]))


def build_double_ring(
    queries: Documents,
    keys: Documents,
    topology: Topology,
    attention: AttentionConfig,
    cp_window_size: int | None = None,
    layout: str = "zigzag",
) -> Plan:
    """The double ring over all ranks.

    Args:
        queries, keys, topology, attention, layout: as for the ring.
        cp_window_size: ranks in a window; default: the ranks of a node.

    Raises:
        ConfigError: the windows do not divide the ranks.
    """
    window = topology.ranks_per_node if cp_window_size is None else cp_window_size
    check_divisor("cp_window_size", window, topology.ranks)
    held, held_kv = place(layout, queries, keys, topology.ranks, attention)
    programs = double_ring(held, held_kv, attention, window)
    return Plan("double_ring", attention, topology, held, held_kv, held, held_kv, *programs)
