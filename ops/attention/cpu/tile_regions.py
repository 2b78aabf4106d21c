"""What of a tile is visible, and how it is cut into blocks of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from mindspeed_cp.plan import BAND, CAUSAL, UNLIMITED, AttentionConfig


class Shape(Enum):
    """What of a block is visible: all of it, a triangle of a square (row i sees the keys 0 .. i, or i .. n - 1), or
    another part."""

    ALL = "all"
    LOWER = "lower triangle"
    UPPER = "upper triangle"
    PART = "part"


@dataclass(frozen=True)
class Block:
    """Some rows of a tile against some of its keys, counted in the tile. Every row sees one of the keys at least, every
    key is seen by one of the rows at least.

    Attributes:
        q: first and last-plus-one row.
        k: first and last-plus-one key.
        shape: what is visible.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    shape: Shape


@dataclass(frozen=True)
class Region:
    r"""The visible part of a tile: what lies between two diagonals.

        keys  0 . . . . . . 7
        row 0 # # # . . . . .      row i sees the keys i + low .. i + high
        row 1 # # # # . . . .      of the tile; here low is -1
        row 2 . # # # # . . .      and high is 2
        row 3 . . # # # # . .

    Attributes:
        rows, keys: of the tile.
        low, high: see above; -UNLIMITED and UNLIMITED are no limit. Every row sees one key at least, every key is seen.
    """

    rows: int
    keys: int
    low: int
    high: int

    @staticmethod
    def of(mask: int, rows: int, keys: int, ahead: int, attention: AttentionConfig) -> Region:
        """The region of a tile.

        Args:
            mask: FULL, CAUSAL or BAND.
            rows: of queries.
            keys: rows of keys.
            ahead: position of the first query minus position of the first key.
            attention: its window counts where the mask is BAND.
        """
        if mask == BAND:
            left, right = attention.reach
            return Region(rows, keys, ahead - left, ahead + right)
        return Region(rows, keys, -UNLIMITED, keys - rows if mask == CAUSAL else UNLIMITED)

    def seen_by(self, row: int) -> tuple[int, int]:
        """First and last-plus-one key of a row."""
        return max(0, row + self.low), min(self.keys, row + self.high + 1)

    @property
    def width(self) -> int:
        """Keys between the two diagonals, in a row where neither end of the tile comes first."""
        return self.high - self.low + 1

    @property
    def edges(self) -> int:
        """How many of the two diagonals cut keys off: 0, 1 or 2."""
        return (self.rows - 1 + self.low > 0) + (self.high + 1 < self.keys)

    def strips(self, rows: int, keys: int | None = None) -> Iterator[Block]:
        r"""Blocks of some rows and all keys that they see; every visible pair is in one block.

            A A A . . . . .
            A A A A . . . .      strips of 2 rows
            B B B B B . . .
            . B B B B B . .

        Args:
            rows: of a block; the last one may have up to half as many more.
            keys: at most so many for each block; None: no limit.
        """
        for a, b in _cut(0, self.rows, rows):
            first, last = self.seen_by(a)[0], self.seen_by(b - 1)[1]
            step = last - first if keys is None else keys
            for c in range(first, last, step):
                yield self._block(a, b, c, min(c + step, last))

    def squares(self, rows: int) -> Iterator[Block]:
        r"""Blocks of some rows, each in a rectangle that all of them see and a triangle at each diagonal that cuts;
        every visible pair is in one block.

            U A A L . . . .      blocks of 2 rows; at most width - 1, so that the triangles do not meet
            . U A L L . . .
            . . U A A L . .
            . . . U A L L .

        Args:
            rows: of a block; fewer where a diagonal begins or ceases to cut.
        """
        borders = sorted({0, self.rows, *(x for x in (-self.low, self.keys - self.high) if 0 < x < self.rows)})
        for start, stop in pairwise(borders):
            for a in range(start, stop, rows):
                b = min(a + rows, stop)
                first, last = self.seen_by(a)[0], self.seen_by(b - 1)[1]
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
        """Those of the rows and keys that see, and are seen by, one of the other side at least."""
        a, b = max(a, first - self.high), min(b, last - self.low)
        c, d = max(first, self.seen_by(a)[0]), min(last, self.seen_by(b - 1)[1])
        cut_low, cut_high = b - 1 + self.low > c, a + self.high + 1 < d
        shape = Shape.PART
        if not cut_low and not cut_high:
            shape = Shape.ALL
        elif b - a == d - c and not cut_low and a + self.high == c:
            shape = Shape.LOWER
        elif b - a == d - c and not cut_high and a + self.low == c:
            shape = Shape.UPPER
        return Block((a, b), (c, d), shape)


def _cut(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """first .. last-1 in steps; a rest of less than half a step goes to the last one."""
    while first < last:
        stop = first + step
        if 2 * (last - stop) < step:
            stop = last
        yield first, stop
        first = stop
