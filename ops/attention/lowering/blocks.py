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

from mindspeed_cp.ops.attention.lowering.fused_call import BLOCK_RECORD, BlockKind, CallLimits
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


# Cut of tiles with ALiBi into squares: the operator computes biases only where queries and keys are equally many.
#
# Its distances are |(j + kv_start) - (i + q_start)| with ONE pair of starts for all sequences of a call. This suffices
# for keys that are all before their queries: a wrong start adds a constant to all distances of a row, cancels in its
# softmax, and is corrected in lse. Keys that are all behind their queries are handled by reversing both sides. A tile
# is therefore cut where positions are equal, and everything beside that square shares a call, whatever the document:
#
#     keys   c       a=x      y=d      b            c       x        b=y      d
#         a  before  | DIAGONAL                  a  behind all keys
#            before  |   DIAGONAL                x          DIAGONAL  | behind
#         y  before  | before                    b            DIAGONAL| behind
#
# The parts beside it are rectangles, with a window without a triangle: ALL of some rows, UPPER and ALL of the others. A
# rectangle is cut into squares by Euclid's algorithm, except where padding is cheaper: the queries of a wide part are
# padded with repetitions of the last one, whose results are dropped. Keys are never padded.


def alibi_blocks(
    tiles: np.ndarray, step_slot: np.ndarray, attention: AttentionConfig, limits: CallLimits
) -> np.ndarray:
    """Return square blocks (records of dtype BLOCK_RECORD with size == k_rows) of tiles.

    Args:
        tiles: records of dtype TILE in execution order.
        step_slot: number of the (step, slot) of each tile.
        attention: its mask and window determine the visible pairs.
        limits: limits of squares.
    """
    if not len(tiles):
        return np.empty(0, BLOCK_RECORD)
    blocks = np.zeros(len(tiles), BLOCK_RECORD)
    for name in ("q_row", "q_rows", "k_row", "k_rows", "doc", "q_pos", "k_pos"):
        blocks[name] = tiles[name]
    blocks["tile"], blocks["step_slot"] = np.arange(len(tiles)), step_slot
    left, right = attention.visible_range
    n, m = blocks["q_rows"], blocks["k_rows"]
    a, c = blocks["q_pos"], blocks["k_pos"]  # queries have positions a .. b - 1, keys c .. d - 1, both x .. y - 1
    b, d = a + n, c + m
    x, y = np.maximum(a, c), np.minimum(b, d)
    meets = x < y
    x, y = np.where(meets, x, 0), np.where(meets, y, 0)

    def rectangle(where: np.ndarray, q: tuple[np.ndarray, np.ndarray], k: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Return the blocks of positions q[0] .. q[1] - 1 and k[0] .. k[1] - 1 of the selected tiles."""
        sizes = [np.where(where, r[1] - r[0], 0) for r in (q, k)]
        return sub_blocks(blocks, BlockKind.SIDE, q[0] - a, sizes[0], k[0] - c, sizes[1])

    before = [
        rectangle(~meets & (a >= d), (a, b), (c, d)),
        rectangle(meets & (c < a), (a, b), (c, a)),
        rectangle(meets & (b > d), (d, b), (x, d)),
    ]
    behind = [
        rectangle(~meets & (b <= c), (a, b), (c, d)),
        rectangle(meets & (a < c), (a, c), (c, d)),
        rectangle(meets & (d > b), (x, b), (b, d)),
    ]
    squares = rectangle(meets, (x, y), (x, y))
    squares["kind"], squares["size"] = BlockKind.DIAGONAL, squares["k_rows"]
    mirrored = _mirrored(np.concatenate(behind), back=False)
    blocks_of_kinds = [
        squares,
        _side_squares(np.concatenate(before), left, limits),
        _mirrored(_side_squares(mirrored, right, limits), back=True),
    ]
    out = np.concatenate(blocks_of_kinds)
    return out[np.argsort(out["tile"], kind="stable")]


def _side_squares(blocks: np.ndarray, reach: int, limits: CallLimits) -> np.ndarray:
    """Return the squares of rectangles whose keys are all before the queries, where a query sees `reach` tokens
    back."""
    a, c = blocks["q_pos"], blocks["k_pos"]
    b, d = a + blocks["q_rows"], c + blocks["k_rows"]
    last, first = (
        np.minimum(b, d + reach),
        np.maximum(c, a - reach),
    )  # end of the queries that see a key, first visible key
    blocks = sub_blocks(blocks, BlockKind.SIDE, np.zeros_like(a), last - a, first - c, d - first)
    n, m = blocks["q_rows"], blocks["k_rows"]
    low = blocks["q_pos"] - blocks["k_pos"] - reach  # row i sees the keys from i + low on
    full = np.clip(1 - low, 0, n)  # rows that see every key
    rest, start, zero = n - full, full + low, np.zeros_like(n)
    upper = sub_blocks(blocks, BlockKind.SIDE_UPPER, full, rest, start, rest)
    upper["size"] = upper["k_rows"]
    rectangles = [
        sub_blocks(blocks, BlockKind.SIDE, zero, full, zero, m),
        sub_blocks(blocks, BlockKind.SIDE, full, rest, start + rest, m - start - rest),
    ]
    return np.concatenate([upper, _cut_to_squares(np.concatenate(rectangles), limits)])


def _mirrored(blocks: np.ndarray, back: bool) -> np.ndarray:
    """Negate positions and rows, so that the last is the first; `back` marks the blocks as reversed."""
    out = blocks.copy()
    for side in ("q", "k"):
        for name in ("_row", "_pos"):
            out[side + name] = 1 - out[side + name] - out[side + "_rows"]
    out["reversed"] = int(back)
    return out


def _cut_to_squares(blocks: np.ndarray, limits: CallLimits) -> np.ndarray:
    """Return rectangles, all of whose pairs are visible, as squares."""
    squares = []
    while len(blocks):
        n, m = blocks["q_rows"], blocks["k_rows"]
        count = np.maximum(1, np.maximum(m // np.maximum(n, limits.min_square), -(-m // limits.max_rows)))
        size = -(-m // count)
        pads = (m // count >= n) & ((size <= limits.pad_up_to) | (4 * size <= 5 * n))
        squares.append(_cut_along_keys(blocks[pads], count[pads]))
        blocks = blocks[~pads]
        n, m = blocks["q_rows"], blocks["k_rows"]
        side = np.minimum(n, m)
        peeled, blocks = _peel_squares(blocks, n > m, side)
        squares.append(peeled)
    return np.concatenate(squares) if squares else np.empty(0, BLOCK_RECORD)


def _cut_along_keys(blocks: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return wide rectangles cut into `count` squares along the keys, with padded queries."""
    block, index = _repeat_index(count)
    first = index * blocks["k_rows"][block] // count[block]
    last = (index + 1) * blocks["k_rows"][block] // count[block]
    blocks = blocks[block]
    out = sub_blocks(blocks, BlockKind.SIDE, 0 * first, blocks["q_rows"], first, last - first)
    out["size"] = out["k_rows"]
    return out


def _peel_squares(blocks: np.ndarray, tall: np.ndarray, side: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return as many squares of the shorter side as fit into each rectangle, and the remainders."""
    n, m = blocks["q_rows"], blocks["k_rows"]
    count = np.where(tall, n, m) // side
    block, index = _repeat_index(count)
    start, size = index * side[block], side[block]
    zero = np.zeros_like(start)
    squares = sub_blocks(
        blocks[block],
        BlockKind.SIDE,
        np.where(tall[block], start, zero),
        size,
        np.where(tall[block], zero, start),
        size,
    )
    squares["size"] = squares["k_rows"]
    done, zero = count * side, np.zeros_like(count)
    q, k = np.where(tall, done, zero), np.where(tall, zero, done)
    return squares, sub_blocks(blocks, BlockKind.SIDE, q, n - q, k, m - k)


def _repeat_index(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return 0 0 0 1 1 ... and 0 1 2 0 1 ... for [3, 2, ...]."""
    item = np.repeat(np.arange(len(count)), count)
    return item, np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
