"""Visible part of a tile, and its cut into blocks of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from mindspeed_cp.plan import BAND, CAUSAL, UNLIMITED, AttentionConfig


class BlockShape(Enum):
    """Visible part of a block: all, a triangle of a square (row i sees the keys 0 .. i, or i .. n - 1), or another
    part."""

    ALL = "all"
    LOWER = "lower triangle"
    UPPER = "upper triangle"
    PART = "part"


@dataclass(frozen=True)
class Block:
    """A block of a tile; rows and keys count within the tile. Every row sees at least one key, and every key is
    visible to at least one row.

    Attributes:
        q: first and last-plus-one row.
        k: first and last-plus-one key.
        shape: visible part.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    shape: BlockShape


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

    @property
    def width(self) -> int:
        """Number of keys between the two diagonals, in a row that neither end of the tile cuts."""
        return self.high - self.low + 1

    @property
    def edges(self) -> int:
        """Number of diagonals that cut off keys: 0, 1 or 2."""
        return (self.rows - 1 + self.low > 0) + (self.high + 1 < self.keys)

    def strips(self, rows: int, keys: int | None = None) -> Iterator[Block]:
        r"""Yield blocks of some rows and all keys visible to them; every visible pair is in one block.

            A A A . . . . .
            A A A A . . . .      strips of 2 rows
            B B B B B . . .
            . B B B B B . .

        Args:
            rows: rows of a block; the last one may have up to half as many more.
            keys: maximum keys of a block; None: no limit.
        """
        for a, b in _cut(0, self.rows, rows):
            first, last = self.visible_keys(a)[0], self.visible_keys(b - 1)[1]
            step = last - first if keys is None else keys
            for c in range(first, last, step):
                yield self._block(a, b, c, min(c + step, last))

    def squares(self, rows: int) -> Iterator[Block]:
        r"""Yield blocks of some rows: a rectangle visible to all of them, and a triangle at each diagonal that cuts;
        every visible pair is in one block.

            U A A L . . . .      blocks of 2 rows; at most width - 1, so that the triangles do not meet
            . U A L L . . .
            . . U A A L . .
            . . . U A L L .

        Args:
            rows: rows of a block; fewer where a diagonal begins or stops to cut.
        """
        borders = sorted({0, self.rows, *(x for x in (-self.low, self.keys - self.high) if 0 < x < self.rows)})
        for start, stop in pairwise(borders):
            for a in range(start, stop, rows):
                b = min(a + rows, stop)
                first, last = self.visible_keys(a)[0], self.visible_keys(b - 1)[1]
                if b - 1 + self.low > 0:
                    yield self._block(a, b, first, first + b - a)
                    first += b - a
                if a + self.high + 1 < self.keys:
                    last -= b - a
                if last > first:
                    yield self._block(a, b, first, last)
                if a + self.high + 1 < self.keys:
                    yield self._block(a, b, last, last + b - a)

    def _block(self, a: int, b: int, first: int, last: int) -> Block:
        """Return the block without rows that see no key of it, and without keys that no row of it sees."""
        a, b = max(a, first - self.high), min(b, last - self.low)
        c, d = max(first, self.visible_keys(a)[0]), min(last, self.visible_keys(b - 1)[1])
        cut_low, cut_high = b - 1 + self.low > c, a + self.high + 1 < d
        shape = BlockShape.PART
        if not cut_low and not cut_high:
            shape = BlockShape.ALL
        elif b - a == d - c and not cut_low and a + self.high == c:
            shape = BlockShape.LOWER
        elif b - a == d - c and not cut_high and a + self.low == c:
            shape = BlockShape.UPPER
        return Block((a, b), (c, d), shape)


def _cut(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield first .. last-1 in steps; a remainder of less than half a step is added to the last one."""
    while first < last:
        stop = first + step
        if 2 * (last - stop) < step:
            stop = last
        yield first, stop
        first = stop
