"""From tiles to calls of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np

from mindspeed_cp.ops.attention.cpu_costs import Costs
from mindspeed_cp.ops.attention.first_touch import FirstTouch, runs
from mindspeed_cp.ops.attention.regions import Block, Region, Shape
from mindspeed_cp.plan import BAND, CAUSAL, FULL, UNLIMITED, AttentionConfig

#: Rows and keys of one block under dropout, where the scores of a block exist: they and their hashes stay in the cache.
DROPOUT_BLOCK = 128

#: Under ALiBi the kernel's own causal mask is used where no bias is larger than this: fp32 then holds scores to 2**-14,
#: which is nothing beside the rounding of bf16 and fp16.
LARGEST_BIAS = 1024.0


#: A causal tile with more keys than queries is one call with a mask up to so many queries, and two calls from there on.
ONE_CALL = 256


class Kind(Enum):
    """How a call is masked: not at all, by the kernel's causal mask, by that mask with rows and keys in reverse, or by
    distance (:mod:`mindspeed_cp.ops.attention.distances`)."""

    PLAIN = "plain"
    CAUSAL = "causal"
    REVERSED = "reversed"
    DISTANCE = "distance"


class Call(NamedTuple):
    """One call of a kernel.

    Attributes:
        q: rows of queries.
        k: rows of the slot.
        kind: its mask. CAUSAL and REVERSED calls are square.
        first: no call before has touched any of these rows, so its result is stored and not merged.
        fresh: where calls before have touched some of the rows, those they have not: they are set to 0 first.
        upcast: in the backward, compute in fp32 although the inputs are not.
        document: number of the document.
        q_pos, k_pos: position of the first query and of the first key.
    """

    q: slice
    k: slice
    kind: Kind = Kind.PLAIN
    first: bool = True
    fresh: tuple[slice, ...] = ()
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


Lowering = dict[tuple[int, int], list[Call]]


def lower(tiles: np.ndarray, rows: int, attention: AttentionConfig, costs: Costs) -> Lowering:
    """Calls for every (step, slot).

    Args:
        tiles: records of dtype TILE in the order they run.
        rows: the rank's queries, which no tile exceeds.
        attention: what is computed.
        costs: of the kernel that will run.
    """
    touch = FirstTouch.of(tiles["q_row"], tiles["q_rows"])
    whole = _whole(tiles, attention)
    calls = _calls_of_whole(tiles, whole, touch, costs)
    before = np.concatenate([[0], np.cumsum(whole)]).tolist()  # calls of whole tiles before each tile
    moves = (tiles["step"][1:] != tiles["step"][:-1]) | (tiles["slot"][1:] != tiles["slot"][:-1])
    alone = ~(whole[1:] & whole[:-1])
    borders = [0, *(np.flatnonzero(moves | alone) + 1).tolist(), len(tiles)] if len(tiles) else []
    out: Lowering = {}
    for a, b in pairwise(borders):
        place = out.setdefault((int(tiles["step"][a]), int(tiles["slot"][a])), [])
        place += (
            calls[before[a] : before[b]] if whole[a] else _calls_of_blocks(tiles[a], touch.touched(a), attention, costs)
        )
    return out


def _whole(tiles: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Which tiles are one call as they are, bool [tiles]: most, where positions do not matter. A window leaves tiles
    that it does not cut."""
    if attention.dropout > 0 or attention.slopes is not None:
        return np.zeros(len(tiles), bool)
    mask = tiles["mask"]
    return (mask == FULL) | ((mask == CAUSAL) & (tiles["q_rows"] == tiles["k_rows"]))


def _calls_of_whole(tiles: np.ndarray, whole: np.ndarray, touch: FirstTouch, costs: Costs) -> list[Call]:
    """The calls of those tiles, all at once: a rank of many has tens of thousands."""
    some = tiles[whole]
    q, q_rows, k, k_rows = (some[name].astype(np.int64) for name in ("q_row", "q_rows", "k_row", "k_rows"))
    causal = some["mask"] == CAUSAL
    fresh: list[tuple[slice, ...]] = [()] * len(tiles)
    for tile in touch.mixed[whole[touch.mixed]].tolist():
        fresh[tile] = touch.fresh_rows(tile)
    return list(
        map(
            Call,
            map(slice, q.tolist(), (q + q_rows).tolist()),
            map(slice, k.tolist(), (k + k_rows).tolist()),
            (Kind.CAUSAL if square else Kind.PLAIN for square in causal.tolist()),
            touch.alone[whole].tolist(),
            compress(fresh, whole),
            costs.upcasts(q_rows, k_rows).tolist(),
            some["doc"].tolist(),
            np.where(causal, some["k_pos"], some["q_pos"]).tolist(),
            some["k_pos"].tolist(),
        )
    )


def _calls_of_blocks(tile: np.void, touched: np.ndarray, attention: AttentionConfig, costs: Costs) -> list[Call]:
    """The calls of a tile that is cut, or needs a mask.

    Args:
        tile: one record.
        touched: bool [rows of the tile], whether tiles before have touched them; updated.
        attention, costs: see :func:`lower`.
    """
    _, _, q_row, q_rows, k_row, k_rows, mask, document, q_pos, k_pos = tile.tolist()
    if mask == CAUSAL:  # a tile may join several runs of positions; its rows and keys are as good
        q_pos = k_pos + k_rows - q_rows
    region = Region.of(mask, q_rows, k_rows, q_pos - k_pos, attention)
    squares, blocks = _blocks(region, mask, q_pos - k_pos, attention, costs)
    out = []
    for block in blocks:
        (a, b), (c, d) = block.q, block.k
        seen = touched[a:b]
        some = bool(seen.any())
        out.append(
            Call(
                q=slice(q_row + a, q_row + b),
                k=slice(k_row + c, k_row + d),
                kind=_kind(block.shape, squares, attention),
                first=not some,
                fresh=runs(~seen, q_row + a) if some and not seen.all() else (),
                upcast=costs.upcasts(b - a, d - c),
                document=document,
                q_pos=q_pos + a,
                k_pos=k_pos + c,
            )
        )
        seen[:] = True
    return out


def _blocks(
    region: Region, mask: int, ahead: int, attention: AttentionConfig, costs: Costs
) -> tuple[bool, Iterable[Block]]:
    """Whether a tile is cut into squares, and its blocks."""
    if attention.dropout > 0:
        return False, region.strips(DROPOUT_BLOCK, DROPOUT_BLOCK)
    if mask != BAND and attention.slopes is None:
        return (False, region.strips(region.rows)) if region.rows <= ONE_CALL else (True, region.squares(region.rows))
    squares, rows = costs.cut(region, _square_rows(region, ahead, attention, costs))
    return squares, region.squares(rows) if squares else region.strips(rows)


def _square_rows(region: Region, ahead: int, attention: AttentionConfig, costs: Costs) -> int:
    """Rows of the largest square that the kernel's causal mask can serve; 0: none."""
    if attention.slopes is None:
        return UNLIMITED
    if not costs.half or region.high > ahead:  # a bias linear in the key needs all keys on one side of the queries
        return 0
    steepest = float(np.abs(attention.slopes).max())
    return int(min(UNLIMITED, 2 * LARGEST_BIAS / steepest)) if steepest else UNLIMITED


def _kind(shape: Shape, squares: bool, attention: AttentionConfig) -> Kind:
    if squares and shape in (Shape.LOWER, Shape.UPPER):
        return Kind.CAUSAL if shape == Shape.LOWER else Kind.REVERSED
    return Kind.PLAIN if shape == Shape.ALL and attention.slopes is None else Kind.DISTANCE
