"""One call of Ascend's fused attention: which rows it takes, how it is masked, where its results belong. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from mindspeed_cp.plan.records import record

#: Rows of a tensor: a run, or row numbers, int64.
Rows = slice | np.ndarray

#: Sequences in one TND call at most (CANN: "TND batch at most 2K").
MOST_SEQUENCES = 2048

#: Rows of queries, or of keys, in one call at most (CANN: "S and T at most 1M").
MOST_ROWS = 1_000_000

#: No limit, for pre_tokens and next_tokens: what the operator's schema has as their default.
NO_LIMIT = 2**31 - 1


#: Squares of up to so many rows are filled up without asking what it costs: the kernel's own blocks are not much
#: smaller.
SMALL = 512

#: A rectangle that is wider than it is tall is cut into squares of so many rows at least.
LEAST = 256


@dataclass(frozen=True)
class Choice:
    """What may be chosen.

    Attributes:
        share: squares beside the diagonal share a call; else each has a call of its own, with its true starts.
        excess: how much larger than its true value a bias may be made by a shared start; what it is rounded by grows
            with it.
        sequences, rows: limits of a call.
        small, least: see SMALL and LEAST.
    """

    share: bool = True
    excess: float = 2.0**12
    sequences: int = MOST_SEQUENCES
    rows: int = MOST_ROWS
    small: int = SMALL
    least: int = LEAST


class Kind(IntEnum):
    """What of a block of queries x keys is visible, row i and key j counted in the block.

    ALL: everything. EDGE: the last row's right limit is the last key, so that the rows before it see fewer: j <= i +
    (keys - rows), and no keys further left than the window. UPPER: a square, j >= i. PAIR: own limits on both sides.

    With ALiBi blocks are squares. DIAGONAL: equal positions on both sides. SIDE and SIDE_UPPER: ALL and UPPER of keys
    that all lie before, or all behind, all queries.
    """

    ALL = 0
    EDGE = 1
    UPPER = 2
    PAIR = 3
    DIAGONAL = 4
    SIDE = 5
    SIDE_UPPER = 6


#: A part of a tile that becomes one sequence of a call.
#:
#: `tile` is the tile's number, `place` that of its (step, slot). The sequence has `size` queries: the q_rows from q_row
#: on, then repetitions of the last one. `behind`: the keys lie behind the queries, and the call has both in reverse
#: order. pre and next: tokens to the left and right of the diagonal that ends in the last row and key, for PAIR.
BLOCK = record("tile place kind q_row q_rows k_row k_rows size behind doc q_pos k_pos pre next")


@dataclass(frozen=True, eq=False)
class Back:
    """Where the rows of a call's result belong.

    Several rows of a call may belong to one row: those are merged, or added, in the call's result first, pair by pair,
    always in the same order.

    Attributes:
        folds: (into, from), one after the other: rows of the result that take in others.
        source: rows of the result that are left.
        target: where they belong, pairwise different.
    """

    folds: tuple[tuple[Rows, Rows], ...]
    source: Rows
    target: Rows


@dataclass(frozen=True, eq=False)
class FusedCall:
    """One call.

    Attributes:
        layout: "TND", or "BSND" with batch size 1.
        q, k: rows of the rank's queries, and of the slot, that are handed over.
        cu_q, cu_k: ends of the sequences, without a leading 0.
        sparse_mode, pre, next: as the operator has them.
        compressed: the 2048 x 2048 mask of ones above the diagonal is given.
        visible: for a mask made for this call: first and last-plus-one key (of those handed over) that each row sees,
            int64 [runs, 2, rows]; what one of the runs holds is visible. None: no such mask.
        starts: q_start_idx and kv_start_idx, or None: no ALiBi.
        shift: for each row, true distance to its keys minus the distance that the operator counts, int64 [rows]. The
            true statistic is the operator's minus slope * shift. None: 0.
        padding: rows of queries whose results count for nothing, or None.
        q_back, k_back: where results with q's rows, and with k's, belong.
        fresh: rows of the target that no call before has touched; True: all of them.
        identity: names what is computed, whatever step and slot it is in.
        placed: what backends keep beside the call: row numbers on a device, masks.
    """

    layout: str
    q: Rows
    k: Rows
    cu_q: list[int]
    cu_k: list[int]
    sparse_mode: int
    pre: int
    next: int
    compressed: bool
    visible: np.ndarray | None
    starts: tuple[int, int] | None
    shift: np.ndarray | None
    padding: Rows | None
    q_back: Back
    k_back: Back
    fresh: bool | np.ndarray
    identity: bytes
    placed: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> int:
        """Queries that are handed over, padding with them."""
        return self.cu_q[-1]

    @property
    def keys(self) -> int:
        """Keys that are handed over."""
        return self.cu_k[-1]


def compact(rows: np.ndarray) -> Rows:
    """A slice, where the numbers rise one by one."""
    n = len(rows)
    if n == 0:
        return slice(0, 0)
    if int(rows[-1]) - int(rows[0]) == n - 1 and (n < 3 or bool((rows[1:] - rows[:-1] == 1).all())):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def ramps(first: np.ndarray, count: np.ndarray, sign: np.ndarray, stop: np.ndarray | None = None) -> np.ndarray:
    """Numbers of several ramps, one after the other: first, first + sign, first + 2 sign, ...

    Args:
        first: the first number of each.
        count: how many numbers it has.
        sign: 1 or -1.
        stop: after so many numbers the last one is repeated; None: never.
    """
    within = np.arange(int(count.sum()), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    if stop is not None:
        within = np.minimum(within, np.repeat(stop - 1, count))
    return np.repeat(first, count) + np.repeat(sign, count) * within


def identity_of(records: np.ndarray, names: tuple[str, ...]) -> bytes:
    """Some fields of records, in their order. (A view of some fields of a record has the bytes of the others too.)"""
    return np.stack([records[name] for name in names]).tobytes()
