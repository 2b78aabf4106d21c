"""Lowering of tiles to calls of the CPU kernels: one call for a tile, unless it needs a mask argument or has dropout.

A full tile and a causal square are one call each, a causal tile with more keys than queries is a rectangle and a
square. Tiles that a window cuts or that have ALiBi need a mask argument, with which the kernel computes every pair:
they are cut into strips of some rows and all keys visible to them. With dropout, whose weights are allocated, strips
are cut again along the keys::

    A A A . . . . .
    A A A A . . . .      strips of 2 rows: A, B, and so on
    B B B B B . . .
    . B B B B B . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from mindspeed_cp.plan import BAND, CAUSAL, FULL, UNLIMITED, AttentionConfig

#: Rows and keys of a block with dropout, where the scores of a block are allocated: they and their hashes fit the
#: cache.
DROPOUT_BLOCK = 128

#: A causal tile with more keys than queries is one call with a mask up to this many queries, and two calls above.
ONE_CALL = 256

#: Rows of a strip. The flash kernels process 32 queries at a time in calls of fewer than 192 queries, 64 below 768 and
#: 256 from 768 on, so that more rows are faster; the corners of a strip are computed in vain, so that fewer waste less.
STRIP_ROWS = (768, 256, 64)


class MaskKind(Enum):
    """Mask of a call: none, the kernel's causal mask, or a mask by distance
    (:mod:`mindspeed_cp.ops.attention.cpu.kernels`), for which queries are computed in reverse order."""

    PLAIN = "plain"
    CAUSAL = "causal"
    DISTANCE = "distance"


class KernelCall(NamedTuple):
    """One call of a kernel.

    Attributes:
        q: rows of queries.
        k: rows of the slot.
        kind: its mask. CAUSAL calls are square.
        stores: True if no earlier call has written any of these rows: the result is stored, not merged.
        unwritten: if earlier calls have written some of the rows, the other rows; they are set to 0 first.
        document: number of the document.
        q_pos, k_pos: position of the first query and of the first key.
    """

    q: slice
    k: slice
    kind: MaskKind = MaskKind.PLAIN
    stores: bool = True
    unwritten: tuple[slice, ...] = ()
    document: int = 0
    q_pos: int = 0
    k_pos: int = 0

    @property
    def rows(self) -> int:
        """Number of queries."""
        return self.q.stop - self.q.start

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.k.stop - self.k.start


KernelCalls = dict[tuple[int, int], list[KernelCall]]

#: Part of a tile: first and last-plus-one row, first and last-plus-one key, counted within the tile.
Block = tuple[int, int, int, int]


def lower_to_kernel_calls(tiles: np.ndarray, attention: AttentionConfig) -> KernelCalls:
    """Return the calls for every (step, slot).

    Args:
        tiles: records of dtype TILE in execution order.
        attention: configuration of the layer.
    """
    # Rows that have a result, by row: faster than an array for the few rows of most tiles.
    written = bytearray(int((tiles["q_row"] + tiles["q_rows"]).max(initial=0)))
    uses_positions = attention.dropout > 0 or attention.slopes is not None
    out: KernelCalls = {}
    for step, slot, q_row, q_rows, k_row, k_rows, mask, document, _, q_pos, k_pos in tiles.tolist():
        if mask == CAUSAL:  # a tile may join several runs of positions; row and key numbers are equivalent
            q_pos = k_pos + k_rows - q_rows
        blocks: Sequence[Block] = ((0, q_rows, 0, k_rows),)
        kind = MaskKind.CAUSAL if mask == CAUSAL else MaskKind.PLAIN
        region = None
        if uses_positions or not (mask == FULL or (mask == CAUSAL and q_rows == k_rows)):  # not one call as it is
            region = TileRegion.of(mask, q_rows, k_rows, q_pos - k_pos, attention)
            blocks = _blocks(region, mask, attention)
        calls = out.setdefault((step, slot), [])
        for a, b, c, d in blocks:
            first, last = q_row + a, q_row + b
            count = written.count(1, first, last)
            calls.append(
                KernelCall(
                    q=slice(first, last),
                    k=slice(k_row + c, k_row + d),
                    kind=kind if region is None else _mask_kind(region, (a, b, c, d), attention),
                    stores=not count,
                    unwritten=true_runs(~np.frombuffer(written, bool)[first:last], first) if 0 < count < b - a else (),
                    document=document,
                    q_pos=q_pos + a,
                    k_pos=k_pos + c,
                )
            )
            written[first:last] = b"\1" * (b - a)
    return out


def _blocks(region: TileRegion, mask: int, attention: AttentionConfig) -> list[Block]:
    """Return the blocks of a tile; every visible pair is in one, every row of a block sees some of its keys."""
    rows, keys = region.rows, region.keys
    if attention.dropout > 0:
        return list(region.strips(DROPOUT_BLOCK, DROPOUT_BLOCK))
    if mask == CAUSAL and attention.slopes is None and rows > ONE_CALL:
        return [(0, rows, 0, keys - rows), (0, rows, keys - rows, keys)]
    if mask != BAND and (mask == FULL or attention.slopes is None):
        return [(0, rows, 0, keys)]
    return list(region.strips(region.strip_rows()))


@dataclass(frozen=True)
class TileRegion:
    r"""The visible part of a tile, between two diagonals.

        keys  0 . . . . . . 7
        row 0 # # # . . . . .      row i sees the keys i + low .. i + high
        row 1 # # # # . . . .      of the tile; here low is -1
        row 2 . # # # # . . .      and high is 2
        row 3 . . # # # # . .

    Attributes:
        rows, keys: rows and keys of the tile.
        low, high: see above; -UNLIMITED and UNLIMITED are no limit. Every row sees at least one key, and every key is
            visible to at least one row.
    """

    rows: int
    keys: int
    low: int
    high: int

    @staticmethod
    def of(mask: int, rows: int, keys: int, ahead: int, attention: AttentionConfig) -> TileRegion:
        """Return the region of a tile.

        Args:
            mask: FULL, CAUSAL or BAND.
            rows: rows of queries.
            keys: rows of keys.
            ahead: position of the first query minus position of the first key.
            attention: its window applies to mask BAND.
        """
        if mask == BAND:
            left, right = attention.visible_range
            return TileRegion(rows, keys, ahead - left, ahead + right)
        return TileRegion(rows, keys, -UNLIMITED, keys - rows if mask == CAUSAL else UNLIMITED)

    def visible_keys(self, row: int) -> tuple[int, int]:
        """Return the first and last-plus-one visible key of a row."""
        return max(0, row + self.low), min(self.keys, row + self.high + 1)

    def strip_rows(self) -> int:
        """Return the rows of strips: at most a quarter of its pairs is wasted, unless few keys are visible."""
        edges = (self.rows - 1 + self.low > 0) + (self.high + 1 < self.keys)  # diagonals that cut off keys
        if not edges:
            return self.rows
        visible = min(self.keys, self.high - self.low + 1)
        return next((rows for rows in STRIP_ROWS if 2 * edges * rows <= visible), STRIP_ROWS[-1])

    def strips(self, rows: int, keys: int | None = None) -> Iterator[Block]:
        """Yield blocks of some rows and all keys visible to them, without rows that see no key of a block, and without
        keys that no row of it sees.

        Args:
            rows: rows of a block; the last one may have up to half as many more.
            keys: maximum keys of a block; None: no limit.
        """
        a = 0
        while a < self.rows:
            b = a + rows if 2 * (self.rows - a - rows) >= rows else self.rows
            first, last = self.visible_keys(a)[0], self.visible_keys(b - 1)[1]
            step = last - first if keys is None else keys
            for c in range(first, last, step):
                d = min(c + step, last)
                top, bottom = max(a, c - self.high), min(b, d - self.low)
                yield top, bottom, max(c, self.visible_keys(top)[0]), min(d, self.visible_keys(bottom - 1)[1])
            a = b


def _mask_kind(region: TileRegion, block: Block, attention: AttentionConfig) -> MaskKind:
    a, b, c, d = block
    if attention.slopes is not None or b - 1 + region.low > c:
        return MaskKind.DISTANCE
    if a + region.high + 1 >= d:
        return MaskKind.PLAIN
    is_square = b - a == d - c and a + region.high == c
    return MaskKind.CAUSAL if is_square and not attention.dropout else MaskKind.DISTANCE


def true_runs(selected: np.ndarray, start: int) -> tuple[slice, ...]:
    """Return the runs of True as slices, counted from `start`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], selected, [False]]).astype(np.int8))) + start
    return tuple(slice(a, b) for a, b in edges.reshape(-1, 2).tolist())
