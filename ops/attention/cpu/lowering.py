"""Lowering of tiles to calls of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np

from mindspeed_cp.ops.attention.cpu.cost_model import CpuCostModel
from mindspeed_cp.ops.attention.cpu.tile_regions import Block, BlockShape, TileRegion
from mindspeed_cp.ops.attention.lowering.first_write import FirstWrite, true_runs
from mindspeed_cp.plan import BAND, CAUSAL, FULL, UNLIMITED, AttentionConfig

#: Rows and keys of a block with dropout, where the scores of a block are allocated: they and their hashes fit the
#: cache.
DROPOUT_BLOCK = 128

#: With ALiBi the kernel's own causal mask is used where no bias is larger than this: fp32 then has scores to 2**-14,
#: which is negligible beside the rounding of bf16 and fp16.
LARGEST_BIAS = 1024.0

#: A causal tile with more keys than queries is one call with a mask up to this many queries, and two calls above.
ONE_CALL = 256


class MaskKind(Enum):
    """Mask of a call: none, the kernel's causal mask, that mask with rows and keys in reverse order, or a mask by
    distance (:mod:`mindspeed_cp.ops.attention.cpu.distance_masks`).

    Attributes:
        is_causal: True if the kernel's causal mask is used.
        flips_q, flips_k: True if queries, or keys, are computed in reverse order.
    """

    PLAIN = "plain", False, False, False
    CAUSAL = "causal", True, False, False
    REVERSED = "reversed", True, True, True
    DISTANCE = "distance", False, True, False

    def __init__(self, title: str, is_causal: bool, flips_q: bool, flips_k: bool) -> None:
        self.is_causal, self.flips_q, self.flips_k = is_causal, flips_q, flips_k


class KernelCall(NamedTuple):
    """One call of a kernel.

    Attributes:
        q: rows of queries.
        k: rows of the slot.
        kind: its mask. CAUSAL and REVERSED calls are square.
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


def lower_to_kernel_calls(tiles: np.ndarray, rows: int, attention: AttentionConfig, costs: CpuCostModel) -> KernelCalls:
    """Return the calls for every (step, slot).

    Args:
        tiles: records of dtype TILE in execution order.
        rows: number of the rank's queries.
        attention: configuration of the layer.
        costs: cost model of the kernel.
    """
    first_write = FirstWrite.of(tiles["q_row"], tiles["q_rows"])
    uncut = _uncut(tiles, attention)
    calls = _calls_of_uncut(tiles, uncut, first_write, costs)
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
                tiles[a], first_write.written_before(a), bool(first_write.shared[a]), attention, costs
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
    tiles: np.ndarray, uncut: np.ndarray, first_write: FirstWrite, costs: CpuCostModel
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
            costs.upcasts(q_rows, k_rows, first_write.shared[uncut]).tolist(),
            uncut_tiles["doc"].tolist(),
            np.where(causal, uncut_tiles["k_pos"], uncut_tiles["q_pos"]).tolist(),
            uncut_tiles["k_pos"].tolist(),
        )
    )


def _calls_of_blocks(
    tile: np.void, written: np.ndarray, shared: bool, attention: AttentionConfig, costs: CpuCostModel
) -> list[KernelCall]:
    """Return the calls of a tile that is cut, or needs a mask argument.

    Args:
        tile: one record.
        written: bool [rows of the tile], True where earlier tiles have written; updated.
        shared: True if another tile writes some of the rows.
        attention, costs: see :func:`lower_to_kernel_calls`.
    """
    _, _, q_row, q_rows, k_row, k_rows, mask, document, _, q_pos, k_pos = tile.tolist()
    if mask == CAUSAL:  # a tile may join several runs of positions; row and key numbers are equivalent
        q_pos = k_pos + k_rows - q_rows
    region = TileRegion.of(mask, q_rows, k_rows, q_pos - k_pos, attention)
    squares, cut = _blocks(region, mask, q_pos - k_pos, attention, costs)
    blocks, writers = list(cut), np.zeros(q_rows, np.int64)
    for block in blocks:
        writers[slice(*block.q)] += 1
    out = []
    for block in blocks:
        (a, b), (c, d) = block.q, block.k
        block_written = written[a:b]
        merges = bool(block_written.any())
        out.append(
            KernelCall(
                q=slice(q_row + a, q_row + b),
                k=slice(k_row + c, k_row + d),
                kind=_kind(block.shape, squares, attention),
                stores=not merges,
                unwritten=true_runs(~block_written, q_row + a) if merges and not block_written.all() else (),
                upcast=costs.upcasts(b - a, d - c, shared or bool(writers[a:b].max() > 1)),
                document=document,
                q_pos=q_pos + a,
                k_pos=k_pos + c,
            )
        )
        block_written[:] = True
    return out


def _blocks(
    region: TileRegion, mask: int, ahead: int, attention: AttentionConfig, costs: CpuCostModel
) -> tuple[bool, Iterable[Block]]:
    """Return True if a tile is cut into squares, and its blocks."""
    if attention.dropout > 0:
        return False, region.strips(DROPOUT_BLOCK, DROPOUT_BLOCK)
    if mask != BAND and attention.slopes is None:
        return (False, region.strips(region.rows)) if region.rows <= ONE_CALL else (True, region.squares(region.rows))
    squares, rows = costs.cut(region, _square_rows(region, ahead, attention, costs))
    return squares, region.squares(rows) if squares else region.strips(rows)


def _square_rows(region: TileRegion, ahead: int, attention: AttentionConfig, costs: CpuCostModel) -> int:
    """Return the rows of the largest square for which the kernel's causal mask can be used; 0: none."""
    if attention.slopes is None:
        return UNLIMITED
    if not costs.half or region.high > ahead:  # a bias linear in the key requires all keys on one side of the queries
        return 0
    steepest = float(np.abs(attention.slopes).max())
    return int(min(UNLIMITED, 2 * LARGEST_BIAS / steepest)) if steepest else UNLIMITED


def _kind(shape: BlockShape, squares: bool, attention: AttentionConfig) -> MaskKind:
    if squares and shape in (BlockShape.LOWER, BlockShape.UPPER):
        return MaskKind.CAUSAL if shape == BlockShape.LOWER else MaskKind.REVERSED
    return MaskKind.PLAIN if shape == BlockShape.ALL and attention.slopes is None else MaskKind.DISTANCE
