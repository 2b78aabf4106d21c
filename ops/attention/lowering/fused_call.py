"""One call of a fused varlen operator: its rows, its mask, and where its results belong. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.plan.records import int64_record

#: Rows of a tensor on the host: a slice (a run), or int64 row numbers.
HostRows = slice | np.ndarray

#: Maximum number of sequences in one TND call (CANN: "TND batch at most 2K"; later texts allow v2 20,000).
MAX_SEQUENCES = 2048

#: Maximum number of rows of queries, or of keys, in one call (CANN: "S and T at most 1M").
MAX_CALL_ROWS = 1_000_000

#: No limit, for pre_tokens and next_tokens: the default of the operator's schema.
NO_LIMIT = 2**31 - 1

#: A rectangle is padded to a square of up to this many rows whatever the padding costs, because the kernel's own blocks
#: are not much smaller.
PAD_UP_TO = 512

#: Minimum number of rows of the squares that a rectangle wider than tall is cut into.
MIN_SQUARE = 256


#: Blocks that share keys are split into several calls if one call would copy at least so many elements of keys and
#: values: reading and writing them, and adding up the gradients of the copies, moves some 28 bytes for each. That takes
#: as long as three launches (20 us at 3 TB/s).
MIN_COPIES = 2**21


@dataclass(frozen=True)
class CallLimits:
    """Limits of one call, and how rectangles are cut under ALiBi.

    Attributes:
        share_calls: squares beside the diagonal share a call; otherwise each has its own call with its true starts.
        max_bias_excess: maximum difference between the bias that a shared start gives and the true bias; the rounding
            error of the bias grows with it.
        max_sequences, max_rows: maximum sequences, and rows of queries or keys, of a call.
        pad_up_to, min_square: see PAD_UP_TO and MIN_SQUARE.
        key_gaps: keys between those of a call may be sequences without queries; otherwise the keys are copied.
        min_copies: see MIN_COPIES.
    """

    share_calls: bool = True
    max_bias_excess: float = 2.0**12
    max_sequences: int = MAX_SEQUENCES
    max_rows: int = MAX_CALL_ROWS
    pad_up_to: int = PAD_UP_TO
    min_square: int = MIN_SQUARE
    key_gaps: bool = True
    min_copies: int = MIN_COPIES


class BlockKind(IntEnum):
    """Visible part of a block of queries x keys; row i and key j count within the block.

    ALL: every key. EDGE: bottom-right causal, j <= i + (keys - rows), and no keys left of the window. UPPER: a square,
    j >= i. PAIR: limits of its own on both sides.

    With ALiBi all blocks are squares. DIAGONAL: queries and keys have the same positions. SIDE and SIDE_UPPER: ALL and
    UPPER, where all keys are before, or all behind, all queries.
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
#: tile: number of the tile. step_slot: number of its (step, slot). The sequence has `size` queries: q_rows rows from
#: q_row on, then repetitions of the last one as padding. reversed: 1 if the keys are behind the queries; the call then
#: has both in reverse order. pre_tokens and next_tokens: for PAIR, visible tokens left and right of the diagonal that
#: ends in the last row and key.
BLOCK_RECORD = int64_record(
    "tile step_slot kind q_row q_rows k_row k_rows size reversed doc q_pos k_pos pre_tokens next_tokens"
)


@dataclass(frozen=True, eq=False)
class ScatterRows:
    """Target rows of the result of a call.

    Several rows of a result may have the same target: these are first merged, or added, pair by pair within the result,
    always in the same order.

    Attributes:
        merges: (into, from) pairs of rows of the result, in the order in which they are merged.
        source: rows of the result that remain.
        target: their target rows, pairwise different.
    """

    merges: tuple[tuple[HostRows, HostRows], ...]
    source: HostRows
    target: HostRows


@dataclass(frozen=True, eq=False)
class FusedCall:
    """One call of the operator.

    Attributes:
        layout: "TND", or "BSND" with a batch of one sequence.
        q, k: rows of the rank's queries, and of the slot, that the call gets.
        actual_seq_qlen, actual_seq_kvlen: ends of the sequences, without a leading 0.
        sparse_mode, pre_tokens, next_tokens: arguments of Ascend's operator.
        uses_compressed_mask: the mask argument is the compressed 2048 x 2048 mask.
        visible_ranges: ranges of visible keys from which the mask of this call is built, int64 [ranges, 2, rows]: first
            and last-plus-one key, counted in k; a key is visible if any range has it. None: no such mask.
        start_idx: q_start_idx and kv_start_idx; None without ALiBi.
        bias_shift: for each row, true distance to its keys minus the distance that the operator uses, int64 [rows]; the
            true lse is that of the operator minus slope * bias_shift. None: 0.
        padding: rows of queries whose results are dropped, or None.
        q_scatter, k_scatter: targets of the results that have the rows of q, and of k.
        unwritten: target rows that no earlier call has written; True: all of them.
        content_key: identifies the computation independently of step and slot.
        device_cache: data that backends keep beside the call: row numbers on a device, masks.
    """

    layout: str
    q: HostRows
    k: HostRows
    actual_seq_qlen: Sequence[int]
    actual_seq_kvlen: Sequence[int]
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    uses_compressed_mask: bool
    visible_ranges: np.ndarray | None
    start_idx: tuple[int, int] | None
    bias_shift: np.ndarray | None
    padding: HostRows | None
    q_scatter: ScatterRows
    k_scatter: ScatterRows
    unwritten: bool | np.ndarray
    content_key: bytes
    device_cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> int:
        """Number of queries, including padding."""
        return self.actual_seq_qlen[-1]

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.actual_seq_kvlen[-1]


def as_host_rows(rows: np.ndarray) -> HostRows:
    """Return a slice if the row numbers are consecutive, else the array."""
    n = len(rows)
    if n == 0:
        return slice(0, 0)
    if int(rows[-1]) - int(rows[0]) == n - 1 and (n < 3 or bool((rows[1:] - rows[:-1] == 1).all())):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def mark_written(written: np.ndarray, rows: HostRows) -> bool | np.ndarray:
    """Return the rows that no earlier call has written (True: all), and mark all rows as written."""
    unwritten = ~written[rows]
    written[rows] = True
    if unwritten.all():
        return True
    return (np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows)[unwritten]


def ramps(first: np.ndarray, count: np.ndarray, sign: np.ndarray, stop: np.ndarray | None = None) -> np.ndarray:
    """Return several ramps one after the other: first, first + sign, first + 2 sign, ...

    Args:
        first: first number of each ramp.
        count: its length.
        sign: 1 or -1.
        stop: number of rising (falling) entries, after which the last one is repeated; None: all.
    """
    within = np.arange(int(count.sum()), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    if stop is not None:
        within = np.minimum(within, np.repeat(stop - 1, count))
    return np.repeat(first, count) + np.repeat(sign, count) * within


def content_key(records: np.ndarray, names: tuple[str, ...]) -> bytes:
    """Return the bytes of some fields of records. (A view of these fields would also have the bytes of the others.)"""
    return np.stack([records[name] for name in names]).tobytes()


def scatter_rows(row: np.ndarray, rows: np.ndarray, start: np.ndarray, is_reversed: np.ndarray) -> ScatterRows:
    """Return the targets of the rows of a result.

    Rows with the same target are merged as a tree, the upper half into the lower one, so that n rows take log2(n)
    merges, each for all targets at once::

        0 1 2 3 4    3 -> 0, 4 -> 1
        0 1 2        2 -> 0
        0 1          1 -> 0

    Args:
        row: first target row of each block.
        rows: number of its target rows.
        start: first row of the block in the result; rows after its first `rows` are padding.
        is_reversed: 1 where the block is in reverse order in the call.
    """
    order = np.argsort(row, kind="stable")
    ends = row[order] + rows[order]
    if len(row) < 2 or bool((row[order][1:] >= np.maximum.accumulate(ends)[:-1]).all()):
        return ScatterRows((), *_unique_targets(start, rows, row, is_reversed))
    target, length, source, sign = _segments(row, rows, start, is_reversed)
    order = np.lexsort((np.arange(len(target)), target))  # by segment, then in the order of blocks
    target, length, source, sign = target[order], length[order], source[order], sign[order]
    begins = np.flatnonzero(np.append(True, target[1:] != target[:-1]))
    count = np.diff(np.append(begins, len(target)))
    first = np.repeat(begins, count)
    index = np.arange(len(target)) - first  # within the segment
    count = np.repeat(count, count)
    merges: list[tuple[HostRows, HostRows]] = []
    while count.max() > 1:
        half = (count + 1) // 2
        upper = np.flatnonzero(index >= half)
        lower = (first + index - half)[upper]
        into, merged = (ramps(source[segment], length[upper], sign[segment]) for segment in (lower, upper))
        merges.append((as_host_rows(into), as_host_rows(merged)))
        remains = index < half
        count = np.where(remains, half, 0)
        index = np.where(remains, index, -1)  # below every half from now on
    target, length, source, sign = target[begins], length[begins], source[begins], sign[begins]
    return ScatterRows(
        tuple(merges), as_host_rows(ramps(source, length, sign)), as_host_rows(ragged_arange(target, length))
    )


def _unique_targets(
    start: np.ndarray, rows: np.ndarray, row: np.ndarray, is_reversed: np.ndarray
) -> tuple[HostRows, HostRows]:
    """Return rows of the result and their targets, where all targets differ."""
    source = ragged_arange(start, rows)
    target = ramps(np.where(is_reversed == 1, row + rows - 1, row), rows, 1 - 2 * is_reversed)
    return as_host_rows(source), as_host_rows(target)


def _segments(
    row: np.ndarray, rows: np.ndarray, start: np.ndarray, is_reversed: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut the blocks where another one begins or ends.

    Returns:
        For each segment its first target row, its length, the row of the result for that target, and 1, or -1 where the
        rows of the result descend.
    """
    edges, edge_index = np.unique(np.stack([row, row + rows]), return_inverse=True)
    first, stop = edge_index.reshape(2, -1)
    segment = ragged_arange(first, stop - first)
    block = np.repeat(np.arange(len(row)), stop - first)
    target, length = edges[segment], edges[segment + 1] - edges[segment]
    offset = target - row[block]
    source = start[block] + np.where(is_reversed[block] == 1, rows[block] - 1 - offset, offset)
    return target, length, source, 1 - 2 * is_reversed[block]
