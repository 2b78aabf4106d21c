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

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import compress, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from mindspeed_cp.plan import BAND, CAUSAL, FULL, UNLIMITED, AttentionConfig

#: Rows and keys of a block with dropout, where the scores of a block are allocated: they and their hashes fit the
#: cache.
DROPOUT_BLOCK = 128

#: A causal tile with more keys than queries is one call with a mask up to this many queries, and two calls above.
ONE_CALL = 256

#: Rows of a strip. The flash kernels process 32 queries at a time in calls of fewer than 192 queries, 64 below 768 and
#: 256 from 768 on, so that more rows are faster; the corners of a strip are computed in vain, so that fewer waste less.
STRIP_ROWS = (768, 256, 64)

#: The flash backward of calls with at most this many pairs, or fewer than 192 queries, is faster in fp32 than in bf16
#: and fp16 (twice as fast if both are small), unless more keys than UPCAST_KEYS make the copies expensive. Up to
#: UPCAST_QUERIES it is slower by an eighth, and the gradients are not rounded in each call.
UPCAST_PAIRS, UPCAST_QUERIES, UPCAST_KEYS = 1 << 16, 767, 1 << 13


@cache
def computes_in(dtype: torch.dtype) -> bool:
    """Return True if the CPU has instructions for products of this type.

    Without them torch's kernels convert blocks of bf16 and fp16 to fp32 again and again: on an AVX2 CPU the flash
    backward takes 5 to 11 times as long as in fp32, and the forward as long or longer.
    """
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


@dataclass(frozen=True)
class Upcasts:
    """Which calls are computed in fp32 although their inputs are bf16 or fp16.

    Attributes:
        backward: True for the backward.
        half: True for inputs in bf16 or fp16.
        always: True if the CPU has no instructions for them, and for the backward under a window: a window's calls are
            so small on one rank that they are in fp32 anyway, and larger ones on other ranks would have up to 1.4 times
            the error.
    """

    backward: bool
    half: bool
    always: bool

    @staticmethod
    def of(direction: str, attention: AttentionConfig, dtype: torch.dtype) -> Upcasts:
        """Return the rule for "forward" or "backward" of an attention in a type."""
        backward = direction == "backward"
        always = not computes_in(dtype) or (backward and attention.window is not None)
        return Upcasts(backward, dtype != torch.float32, always)

    def __call__(self, queries: Any, keys: Any, merged: Any) -> Any:
        """Return True for calls in fp32.

        Args:
            queries, keys: size of the call, or of many, int64 [calls].
            merged: True if another call writes some of its rows. Its output is then not rounded before it is merged.
        """
        small = (queries * keys <= UPCAST_PAIRS) | ((queries <= UPCAST_QUERIES) & (keys <= UPCAST_KEYS))
        return ((small if self.backward else merged) | self.always) & self.half


class MaskKind(Enum):
    """Mask of a call: none, the kernel's causal mask, or a mask by distance
    (:mod:`mindspeed_cp.ops.attention.cpu.distance_masks`), for which queries are computed in reverse order."""

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
        upcast: compute in fp32 although the inputs are bf16 or fp16.
        document: number of the document.
        q_pos, k_pos: position of the first query and of the first key.
    """

    q: slice
    k: slice
    kind: MaskKind = MaskKind.PLAIN
    stores: bool = True
    unwritten: tuple[slice, ...] = ()
    upcast: bool = False
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


def lower_to_kernel_calls(tiles: np.ndarray, attention: AttentionConfig, upcasts: Upcasts) -> KernelCalls:
    """Return the calls for every (step, slot).

    Args:
        tiles: records of dtype TILE in execution order.
        attention: configuration of the layer.
        upcasts: which calls are in fp32.
    """
    first_write = FirstWrite.of(tiles["q_row"], tiles["q_rows"])
    uncut = _uncut(tiles, attention)
    calls = _calls_of_uncut(tiles, uncut, first_write, upcasts)
    before = np.concatenate([[0], np.cumsum(uncut)]).tolist()  # calls of uncut tiles before each tile
    changes = (tiles["step"][1:] != tiles["step"][:-1]) | (tiles["slot"][1:] != tiles["slot"][:-1])
    cut = ~(uncut[1:] & uncut[:-1])
    borders = [0, *(np.flatnonzero(changes | cut) + 1).tolist(), len(tiles)] if len(tiles) else []
    out: KernelCalls = {}
    for a, b in pairwise(borders):
        step_calls = out.setdefault((int(tiles["step"][a]), int(tiles["slot"][a])), [])
        step_calls += (
            calls[before[a] : before[b]]
            if uncut[a]
            else _calls_of_blocks(
                tiles[a], first_write.written_before(a), bool(first_write.shared[a]), attention, upcasts
            )
        )
    return out


def _uncut(tiles: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Return bool [tiles]: True for tiles that are one call as they are. That needs no positions (no ALiBi, no
    dropout) and no window that cuts the tile."""
    if attention.dropout > 0 or attention.slopes is not None:
        return np.zeros(len(tiles), bool)
    mask = tiles["mask"]
    return (mask == FULL) | ((mask == CAUSAL) & (tiles["q_rows"] == tiles["k_rows"]))


def _calls_of_uncut(
    tiles: np.ndarray, uncut: np.ndarray, first_write: FirstWrite, upcasts: Upcasts
) -> list[KernelCall]:
    """Return the calls of uncut tiles, vectorised: one of many ranks may have tens of thousands."""
    uncut_tiles = tiles[uncut]
    q, q_rows, k, k_rows = (uncut_tiles[name].astype(np.int64) for name in ("q_row", "q_rows", "k_row", "k_rows"))
    causal = uncut_tiles["mask"] == CAUSAL
    unwritten: list[tuple[slice, ...]] = [()] * len(tiles)
    for tile in first_write.partly_written[uncut[first_write.partly_written]].tolist():
        unwritten[tile] = first_write.unwritten_rows(tile)
    return list(
        map(
            KernelCall,
            map(slice, q.tolist(), (q + q_rows).tolist()),
            map(slice, k.tolist(), (k + k_rows).tolist()),
            (MaskKind.CAUSAL if square else MaskKind.PLAIN for square in causal.tolist()),
            first_write.all_unwritten[uncut].tolist(),
            compress(unwritten, uncut),
            upcasts(q_rows, k_rows, first_write.shared[uncut]).tolist(),
            uncut_tiles["doc"].tolist(),
            np.where(causal, uncut_tiles["k_pos"], uncut_tiles["q_pos"]).tolist(),
            uncut_tiles["k_pos"].tolist(),
        )
    )


def _calls_of_blocks(
    tile: np.void, written: np.ndarray, shared: bool, attention: AttentionConfig, upcasts: Upcasts
) -> list[KernelCall]:
    """Return the calls of a tile that is cut, or needs a mask argument.

    Args:
        tile: one record.
        written: bool [rows of the tile], True where earlier tiles have written; updated.
        shared: True if another tile writes some of the rows.
        attention, upcasts: see :func:`lower_to_kernel_calls`.
    """
    _, _, q_row, q_rows, k_row, k_rows, mask, document, _, q_pos, k_pos = tile.tolist()
    if mask == CAUSAL:  # a tile may join several runs of positions; row and key numbers are equivalent
        q_pos = k_pos + k_rows - q_rows
    region = TileRegion.of(mask, q_rows, k_rows, q_pos - k_pos, attention)
    blocks = _blocks(region, mask, attention)
    several = len(blocks) > 1 and (mask == CAUSAL or attention.dropout > 0)  # strips share no rows
    calls = []
    for a, b, c, d in blocks:
        block_written = written[a:b]
        merges = bool(block_written.any())
        calls.append(
            KernelCall(
                q=slice(q_row + a, q_row + b),
                k=slice(k_row + c, k_row + d),
                kind=_mask_kind(region, (a, b, c, d), attention),
                stores=not merges,
                unwritten=true_runs(~block_written, q_row + a) if merges and not block_written.all() else (),
                upcast=upcasts(b - a, d - c, shared or several),
                document=document,
                q_pos=q_pos + a,
                k_pos=k_pos + c,
            )
        )
        block_written[:] = True
    return calls


#: Part of a tile: first and last-plus-one row, first and last-plus-one key, counted within the tile.
Block = tuple[int, int, int, int]


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


@dataclass(frozen=True)
class FirstWrite:
    """First tile on every row, for tiles that write all their rows.

    Many tiles share few borders, so that rows are grouped into segments between two borders:

        tile 0    # # # # # . . .
        tile 1    . . # # # # # .
        segment   0 0 1 1 1 2 2      first tile on it: 0, 0 and 1

    Attributes:
        edges: rows at which tiles begin or end, ascending; segment i is the rows edges[i] .. edges[i + 1] - 1.
        first: number of the first tile on each segment; the number of tiles if there is none.
        start, stop: first and last-plus-one segment of each tile.
        unwritten: for each tile, number of its segments that no earlier tile has written.
        shared: bool [tiles], True where another tile, earlier or later, writes a row of the tile.
    """

    edges: np.ndarray
    first: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    unwritten: np.ndarray
    shared: np.ndarray

    @staticmethod
    def of(q_row: np.ndarray, q_rows: np.ndarray) -> FirstWrite:
        """Find the first tiles.

        Args:
            q_row: first row of each tile, in execution order.
            q_rows: rows of each tile.
        """
        edges, edge_index = np.unique(np.stack([q_row, q_row + q_rows]), return_inverse=True)
        start, stop = edge_index.reshape(2, -1)
        count = stop - start
        tile = np.repeat(np.arange(len(count)), count)
        segment = np.arange(len(tile)) + np.repeat(start - (np.cumsum(count) - count), count)
        first = np.full(len(edges), len(count))
        np.minimum.at(first, segment, tile)
        unwritten = np.bincount(tile[first[segment] == tile], minlength=len(count))
        several = np.bincount(segment, minlength=len(edges)) > 1
        shared_before = np.concatenate([[0], np.cumsum(several)])
        return FirstWrite(edges, first, start, stop, unwritten, shared_before[stop] > shared_before[start])

    @property
    def all_unwritten(self) -> np.ndarray:
        """bool [tiles]: True where no earlier tile has written any row of the tile."""
        return self.unwritten == self.stop - self.start

    @property
    def partly_written(self) -> np.ndarray:
        """Numbers of the tiles of which earlier tiles have written some rows, but not all."""
        return np.flatnonzero((self.unwritten > 0) & ~self.all_unwritten)

    def unwritten_rows(self, tile: int) -> tuple[slice, ...]:
        """Return the runs of rows of a tile that no earlier tile has written."""
        a, b = self.start[tile], self.stop[tile]
        edges = self.edges[a : b + 1].tolist()
        return tuple(slice(edges[run.start], edges[run.stop]) for run in true_runs(self.first[a:b] == tile, 0))

    def written_before(self, tile: int) -> np.ndarray:
        """Return bool [rows of the tile]: True where an earlier tile has written the row."""
        a, b = self.start[tile], self.stop[tile]
        return np.repeat(self.first[a:b] < tile, np.diff(self.edges[a : b + 1]))


def true_runs(selected: np.ndarray, start: int) -> tuple[slice, ...]:
    """Return the runs of True as slices, counted from `start`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], selected, [False]]).astype(np.int8))) + start
    return tuple(slice(a, b) for a, b in edges.reshape(-1, 2).tolist())
