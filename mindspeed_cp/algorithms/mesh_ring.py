"""Rings over all links of a mesh: shares of every block travel at once, on Hamilton cycles that share no link.

Each run of rows of a block of keys and values is cut into as many pieces as there are cycles; piece i travels on cycle
i, one rank per step, as a block does in a ring. All pieces that a rank has in a step lie in one slot in token order, so
that they make as few tiles as in a ring::

    cycles         0 1 2 .. and 0 2 1 ..       of 3 ranks
    step           0        1            2
    rank 0 holds   0        2', 1"       1', 2"           (' and ": the pieces of a block on the two cycles)

In every step each rank computes with a share of several blocks that is as large as one block. Under a causal mask and
the zig-zag layout its work is the ring's, because a share has its part of both chunks of each block. In the backward,
gradients follow their pieces one step behind, as in a ring, from the first rank that sees a piece on; the last one
returns the gradient to the owner. (Wang et al. 2025, arXiv 2509.26541, for cycles in place of one ring.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mindspeed_cp.algorithms.kv_fetch.needs import KvFetches, concatenate_messages, messages_of, needed_tokens
from mindspeed_cp.algorithms.kv_fetch.programs import slot_capacity, slot_contents
from mindspeed_cp.algorithms.kv_fetch.schedule import Buffer, Hop, Schedule
from mindspeed_cp.algorithms.split_local_block import halve_local_block
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.problem import AttentionConfig
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import Messages

#: Runs with fewer rows for each cycle travel whole, on one of the cycles: pieces of few rows cost more than they save.
MIN_PIECE_ROWS = 16


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of tokens that travel on one cycle each, as columns int64 [pieces].

    Attributes:
        owner, doc, start, stop: rank, document, first and last-plus-one token.
        row: first row in slot 0 of the owner.
        cycle: cycle on which the piece travels.
    """

    owner: np.ndarray
    doc: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    row: np.ndarray
    cycle: np.ndarray

    @staticmethod
    def of(keys: Layout, cycles: int) -> Pieces:
        """Cut the runs of every rank for so many cycles."""
        spans = keys.spans
        rows = spans["stop"] - spans["start"]
        is_cut = rows >= cycles * MIN_PIECE_ROWS
        # Whole runs of a rank take the cycles in turn, by the rows before them.
        whole = np.where(is_cut, 0, rows)
        before = np.cumsum(whole) - whole
        per_rank = np.bincount(spans["rank"], whole, keys.ranks).astype(np.int64)
        before -= (np.cumsum(per_rank) - per_rank)[spans["rank"]]
        turn = before * cycles // np.maximum(per_rank[spans["rank"]], 1)
        count = np.where(is_cut, cycles, 1)
        span = np.repeat(np.arange(len(spans)), count)
        number = np.arange(len(span)) - np.repeat(np.cumsum(count) - count, count)
        first = rows[span] * number // count[span]
        last = rows[span] * (number + 1) // count[span]
        start = spans["start"][span]
        return Pieces(
            np.ascontiguousarray(spans["rank"][span]),
            np.ascontiguousarray(spans["doc"][span]),
            start + first,
            start + last,
            keys.span_first_rows[span] + first,
            np.where(is_cut[span], number, turn[span]),
        )

    def seen(self, queries: Layout, keys: Layout, attention: AttentionConfig) -> np.ndarray:
        """Return True where the queries of a rank see any token of a piece, bool [pieces, ranks]."""
        out = np.zeros((len(self.start), keys.ranks), bool)
        for rank, runs in enumerate(needed_tokens(queries, keys, attention).rank_runs(keys.ranks)):
            begun = np.searchsorted(runs[:, 0], self.stop, "left")
            out[:, rank] = begun > np.searchsorted(runs[:, 1], self.start, "right")
        return out


def mesh_ring_programs(
    queries: Layout, keys: Layout, attention: AttentionConfig, cycles: np.ndarray
) -> tuple[Program, Program]:
    """Return the forward and backward program of rings on several cycles.

    Args:
        queries: layout of queries.
        keys: layout of keys and values on the same ranks.
        attention: attention of one layer.
        cycles: orders of all ranks, int64 [cycles, ranks]; no two of them have a link in common.
    """
    ranks, pieces = keys.ranks, Pieces.of(keys, len(cycles))
    seen = pieces.seen(queries, keys, attention)
    position = np.argsort(cycles, axis=1)[pieces.cycle, pieces.owner]
    rank_at = cycles[pieces.cycle[:, None], (position[:, None] + np.arange(ranks)) % ranks]  # [pieces, hops]
    hops = np.arange(ranks)
    seen_at = np.take_along_axis(seen, rank_at, 1) & (hops > 0)
    last_hop = np.where(seen_at, hops, 0).max(axis=1, initial=0)
    first_hop = np.where(seen_at, hops, ranks).min(axis=1, initial=ranks)

    piece, hop = np.nonzero((hops > 0) & (hops <= last_hop[:, None]))
    fetches, row_at = _hops(pieces, piece, hop, rank_at)
    slot = np.where(hops == 0, 0, 1 + (hops - 1) % 2)  # by hop
    stages = hops[:-1]  # hop h is stage h - 1
    move = Hop(fetches, stages, stages, stages + 1, stages + 1, slot[:-1], slot[1:])
    moved = _piece_of(fetches, pieces)
    needed = seen[moved, fetches.dst]
    times = Schedule([move], [Buffer(fetches, stages + 1, slot[1:], needed)], 0, 0)
    contents, spans = slot_contents(keys, times)
    capacity = np.zeros((ranks, 3), np.int64)
    used = slot_capacity(keys, times)
    capacity[:, : used.shape[1]] = used
    fetch = concatenate_messages([move.fetch()])
    follows = fetches.stage >= first_hop[moved]  # stage h takes a piece from hop h
    returns = _returns(pieces, last_hop, rank_at, row_at)
    reduce = concatenate_messages(
        [_gradients(fetches[follows], slot[:-1], slot[1:]), _gradients(returns, slot, np.zeros_like(slot))]
    )

    documents = keys.documents
    forward_steps = int(contents["step"].max(initial=0)) + 1
    backward_steps = max(forward_steps, int(reduce.items["done"].max(initial=-1)) + 1)
    forward = Program(forward_steps, capacity, queries, documents, attention, contents, spans, fetch, Messages.empty())
    if len(reduce):
        contents, spans = halve_local_block(queries, keys, attention, contents, spans, backward_steps - 1)
    return forward, Program(
        backward_steps, capacity, queries, documents, attention, contents, spans, fetch, reduce
    )  # fmt: skip


def _hops(pieces: Pieces, piece: np.ndarray, hop: np.ndarray, rank_at: np.ndarray) -> tuple[KvFetches, np.ndarray]:
    """Return the moves of all pieces, stage h - 1 into hop h, and the first row of each piece in the slot of each hop,
    int64 [pieces, hops]."""
    order = np.lexsort((pieces.start[piece], rank_at[piece, hop], hop))
    piece, hop = piece[order], hop[order]
    zero = np.zeros(len(piece), np.int64)
    fetches = KvFetches(
        hop - 1, rank_at[piece, hop], rank_at[piece, hop - 1], pieces.doc[piece], pieces.start[piece],
        pieces.stop[piece], zero, zero,
    ).packed()  # fmt: skip
    row_at = np.zeros(rank_at.shape, np.int64)
    row_at[:, 0] = pieces.row
    row_at[piece, hop] = fetches.dst_row
    return replace(fetches, src_row=row_at[piece, hop - 1]), row_at


def _piece_of(fetches: KvFetches, pieces: Pieces) -> np.ndarray:
    """Return the index of the piece that each fetch moves."""
    order = np.argsort(pieces.start, kind="stable")
    return order[np.searchsorted(pieces.start[order], fetches.start)]


def _returns(pieces: Pieces, last_hop: np.ndarray, rank_at: np.ndarray, row_at: np.ndarray) -> KvFetches:
    """Return the moves of gradients from the last rank that sees a piece to its owner; stage: the last hop."""
    piece = np.flatnonzero(last_hop)
    piece = piece[np.lexsort((pieces.start[piece], pieces.owner[piece], last_hop[piece]))]
    hop = last_hop[piece]
    return KvFetches(
        hop, pieces.owner[piece], rank_at[piece, hop], pieces.doc[piece], pieces.start[piece], pieces.stop[piece],
        row_at[piece, hop], pieces.row[piece],
    )  # fmt: skip


def _gradients(moves: KvFetches, src_slot: np.ndarray, dst_slot: np.ndarray) -> Messages:
    """Return the messages of gradients: those of stage h, from the ranks that compute in step h, move in step h + 1."""
    messages, stage = messages_of(moves, src_slot, dst_slot)
    messages.items["start"] = messages.items["done"] = stage + 1
    return messages
