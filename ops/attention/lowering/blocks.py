r"""Tiles without ALiBi as blocks of at most three kinds, one call for each kind.

A full tile is ALL, a causal tile EDGE. A window cuts a tile along two diagonals. If the right one ends in the last row,
the tile is EDGE, with the width of the window; if only the left one cuts and ends in the last row, it is UPPER::

     EDGE              EDGE, window       UPPER             neither: cut into EDGE, ALL, UPPER and ALL
     # # # . .         . # # . .          # # # #           # # . . . .     E
     # # # # .         . . # # .          . # # #           # # # . . .     E
     # # # # #         . . . # #          . . # #           # # # # # #     A
                                                            . # # # # #     U A
                                                            . . # # # #     U A
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.ops.attention.lowering.fused_call import BLOCK_RECORD, BlockKind
from mindspeed_cp.plan import BAND, CAUSAL, AttentionConfig

_CALL_KINDS = (BlockKind.ALL, BlockKind.EDGE, BlockKind.UPPER)


def plain_blocks(tiles: np.ndarray, step_slot: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Return the blocks (records of dtype BLOCK_RECORD) of tiles, with as few calls for each (step, slot) as possible.

    Args:
        tiles: records of dtype TILE in execution order.
        step_slot: number of the (step, slot) of each tile.
        attention: its window applies to tiles with mask BAND.
    """
    blocks = np.zeros(len(tiles), BLOCK_RECORD)
    for name in ("q_row", "q_rows", "k_row", "k_rows", "doc", "q_pos", "k_pos"):
        blocks[name] = tiles[name]
    blocks["tile"], blocks["step_slot"], blocks["size"] = np.arange(len(tiles)), step_slot, tiles["q_rows"]
    blocks["kind"] = np.where(tiles["mask"] == CAUSAL, BlockKind.EDGE, BlockKind.ALL)
    band = tiles["mask"] == BAND
    if not band.any():
        return blocks
    low, high = _diagonals(blocks, attention)
    n, m = blocks["q_rows"], blocks["k_rows"]
    blocks["pre_tokens"], blocks["next_tokens"] = m - n - low, high - (m - n)
    ends_right, ends_left = blocks["next_tokens"] == 0, (blocks["pre_tokens"] == 0) & (high >= m - 1)
    kind = np.where(ends_right, BlockKind.EDGE, np.where(ends_left, BlockKind.UPPER, BlockKind.PAIR))
    blocks["kind"] = np.where(band, kind, blocks["kind"])
    pair = blocks["kind"] == BlockKind.PAIR
    if not pair.any():
        return blocks
    parts = _cut(blocks[pair], low[pair], high[pair])
    cut = _worth_cutting(blocks, parts)
    out = np.concatenate([blocks[~(pair & cut[step_slot])], parts[cut[parts["step_slot"]]]])
    return out[np.lexsort((out["k_pos"], out["q_row"], out["tile"], out["step_slot"]))]


def _diagonals(blocks: np.ndarray, attention: AttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return (low, high): row i of a block sees the keys i + low .. i + high of the block."""
    left, right = attention.visible_range
    ahead = blocks["q_pos"] - blocks["k_pos"]
    return ahead - left, ahead + right


def _worth_cutting(blocks: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return bool [(step, slot)]: True where cutting PAIR blocks takes fewer calls than one for each pair of limits."""
    step_slots = int(blocks["step_slot"].max()) + 1
    whole, cut = np.zeros((2, step_slots, len(_CALL_KINDS)), bool)
    plain = blocks[blocks["kind"] != BlockKind.PAIR]
    whole[plain["step_slot"], plain["kind"]] = True
    cut[parts["step_slot"], parts["kind"]] = True
    pair_blocks = blocks[blocks["kind"] == BlockKind.PAIR]
    pairs = np.unique(np.stack([pair_blocks[name] for name in ("step_slot", "pre_tokens", "next_tokens")]), axis=1)
    return (whole | cut).sum(1) < whole.sum(1) + np.bincount(pairs[0], minlength=step_slots)


def _cut(blocks: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return PAIR blocks cut into EDGE, ALL, UPPER and ALL; see the picture above."""
    n, m = blocks["q_rows"], blocks["k_rows"]
    edge = np.where(high < m - 1, np.clip(m - high, 0, n), 0)  # rows up to the one whose right limit is the last key
    full = np.clip(1 - low, edge, n)  # rows up to the first that does not see the first key
    rest = n - full
    first = full + low  # its first key
    parts = [
        sub_blocks(blocks, BlockKind.EDGE, 0 * n, edge, 0 * n, m),
        sub_blocks(blocks, BlockKind.ALL, edge, full - edge, 0 * n, m),
        sub_blocks(blocks, BlockKind.UPPER, full, rest, first, rest),
        sub_blocks(blocks, BlockKind.ALL, full, rest, first + rest, m - first - rest),
    ]
    return np.concatenate(parts)


def sub_blocks(
    blocks: np.ndarray, kind: BlockKind, q: np.ndarray, q_rows: np.ndarray, k: np.ndarray, k_rows: np.ndarray
) -> np.ndarray:
    """Return a part of each block, given by rows and keys counted in the block; empty parts are left out."""
    nonempty = np.flatnonzero((q_rows > 0) & (k_rows > 0))
    out, q, q_rows, k, k_rows = (x[nonempty] for x in (blocks, q, q_rows, k, k_rows))
    out["kind"] = kind
    out["q_row"] += q
    out["q_pos"] += q
    out["k_row"] += k
    out["k_pos"] += k
    out["q_rows"], out["k_rows"], out["size"] = q_rows, k_rows, q_rows
    out["pre_tokens"], out["next_tokens"] = 0, 0
    return out
