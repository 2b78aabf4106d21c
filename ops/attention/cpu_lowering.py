"""From tiles to calls of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from mindspeed_cp.ops.attention.cpu_costs import Costs
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


@dataclass(frozen=True)
class Call:
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
        rows: the rank's queries.
        attention: what is computed.
        costs: of the kernel that will run.
    """
    out: Lowering = {}
    touched = np.zeros(rows, bool)
    for step, slot, q_row, q_rows, k_row, k_rows, mask, document, q_pos, k_pos in tiles.tolist():
        calls = out.setdefault((step, slot), [])
        if mask == CAUSAL:  # a tile may join several runs of positions; its rows and keys are as good
            q_pos = k_pos + k_rows - q_rows
        region = Region.of(mask, q_rows, k_rows, q_pos - k_pos, attention)
        squares, blocks = _blocks(region, mask, q_pos - k_pos, attention, costs)
        for block in blocks:
            (a, b), (c, d) = block.q, block.k
            q = slice(q_row + a, q_row + b)
            seen = touched[q]
            some = bool(seen.any())
            calls.append(
                Call(
                    q=q,
                    k=slice(k_row + c, k_row + d),
                    kind=_kind(block.shape, squares, attention),
                    first=not some,
                    fresh=_runs(~seen, q.start) if some and not seen.all() else (),
                    upcast=costs.upcasts(b - a, d - c),
                    document=document,
                    q_pos=q_pos + a,
                    k_pos=k_pos + c,
                )
            )
            touched[q] = True
    return out


def _blocks(
    region: Region, mask: int, ahead: int, attention: AttentionConfig, costs: Costs
) -> tuple[bool, Iterable[Block]]:
    """Whether a tile is cut into squares, and its blocks."""
    if attention.dropout > 0:
        return False, region.strips(DROPOUT_BLOCK, DROPOUT_BLOCK)
    if mask != BAND and attention.slopes is None:
        past = region.keys - region.rows
        if mask == FULL or past == 0:  # most tiles: no need to look closer
            return True, (Block((0, region.rows), (0, region.keys), Shape.ALL if mask == FULL else Shape.LOWER),)
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


def _runs(wanted: np.ndarray, start: int) -> tuple[slice, ...]:
    """Runs of True, counted from `start`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8))) + start
    return tuple(slice(a, b) for a, b in edges.reshape(-1, 2).tolist())
