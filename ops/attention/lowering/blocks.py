r"""Tiles without ALiBi as blocks of at most three kinds, each kind one call.

A full tile is ALL, a causal one EDGE; without a window there is nothing else. The window cuts two diagonals out of a
tile. Where its right one ends in the last row, the tile is EDGE too, with the window's width for all; where only its
left one cuts and ends in the last row, the tile is UPPER::

     EDGE              EDGE, window       UPPER             neither: cut into EDGE, ALL, UPPER and ALL
     # # # . .         . # # . .          # # # #           # # . . . .     E
     # # # # .         . . # # .          . # # #           # # # . . .     E
     # # # # #         . . . # #          . . # #           # # # # # #     A
                                                            . # # # # #     U A
                                                            . . # # # #     U A
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.ops.attention.npu_calls import BLOCK, Kind
from mindspeed_cp.plan import BAND, CAUSAL, AttentionConfig

_CALLS = (Kind.ALL, Kind.EDGE, Kind.UPPER)


def plain_blocks(tiles: np.ndarray, place: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Blocks (records of dtype BLOCK) of tiles (records of dtype TILE), so that every place has as few calls as can be.

    Args:
        tiles: in the order they run.
        place: number of each tile's (step, slot).
        attention: its window counts where a tile's mask is BAND.
    """
    blocks = np.zeros(len(tiles), BLOCK)
    for name in ("q_row", "q_rows", "k_row", "k_rows", "doc", "q_pos", "k_pos"):
        blocks[name] = tiles[name]
    blocks["tile"], blocks["place"], blocks["size"] = np.arange(len(tiles)), place, tiles["q_rows"]
    blocks["kind"] = np.where(tiles["mask"] == CAUSAL, Kind.EDGE, Kind.ALL)
    band = tiles["mask"] == BAND
    if not band.any():
        return blocks
    low, high = _limits(blocks, attention)
    n, m = blocks["q_rows"], blocks["k_rows"]
    blocks["pre"], blocks["next"] = m - n - low, high - (m - n)
    ends_right, ends_left = blocks["next"] == 0, (blocks["pre"] == 0) & (high >= m - 1)
    kind = np.where(ends_right, Kind.EDGE, np.where(ends_left, Kind.UPPER, Kind.PAIR))
    blocks["kind"] = np.where(band, kind, blocks["kind"])
    pair = blocks["kind"] == Kind.PAIR
    if not pair.any():
        return blocks
    pieces = _cut(blocks[pair], low[pair], high[pair])
    cut = _worth_cutting(blocks, pieces)
    out = np.concatenate([blocks[~(pair & cut[place])], pieces[cut[pieces["place"]]]])
    return out[np.lexsort((out["k_pos"], out["q_row"], out["tile"], out["place"]))]


def _limits(blocks: np.ndarray, attention: AttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Row i of a block sees its keys i + low .. i + high."""
    left, right = attention.reach
    ahead = blocks["q_pos"] - blocks["k_pos"]
    return ahead - left, ahead + right


def _worth_cutting(blocks: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """For every place whether cutting its PAIR blocks makes fewer calls than one for each pair, bool [places]."""
    places = int(blocks["place"].max()) + 1
    whole, cut = np.zeros((2, places, len(_CALLS)), bool)
    plain = blocks[blocks["kind"] != Kind.PAIR]
    whole[plain["place"], plain["kind"]] = True
    cut[pieces["place"], pieces["kind"]] = True
    own = blocks[blocks["kind"] == Kind.PAIR]
    pairs = np.unique(np.stack([own["place"], own["pre"], own["next"]]), axis=1)
    return (whole | cut).sum(1) < whole.sum(1) + np.bincount(pairs[0], minlength=places)


def _cut(blocks: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """PAIR blocks as EDGE, ALL, UPPER and ALL; see the picture above."""
    n, m = blocks["q_rows"], blocks["k_rows"]
    edge = np.where(high < m - 1, np.clip(m - high, 0, n), 0)  # rows up to the one whose right limit is the last key
    all_ = np.clip(1 - low, edge, n)  # rows up to the first that does not see the first key
    rest = n - all_
    first = all_ + low  # its first key
    parts = [
        part(blocks, Kind.EDGE, 0 * n, edge, 0 * n, m),
        part(blocks, Kind.ALL, edge, all_ - edge, 0 * n, m),
        part(blocks, Kind.UPPER, all_, rest, first, rest),
        part(blocks, Kind.ALL, all_, rest, first + rest, m - first - rest),
    ]
    return np.concatenate(parts)


def part(
    blocks: np.ndarray, kind: Kind, q: np.ndarray, q_rows: np.ndarray, k: np.ndarray, k_rows: np.ndarray
) -> np.ndarray:
    """Parts of blocks, rows and keys counted in the block; those without rows or keys are left out."""
    there = np.flatnonzero((q_rows > 0) & (k_rows > 0))
    out, q, q_rows, k, k_rows = (x[there] for x in (blocks, q, q_rows, k, k_rows))
    out["kind"] = kind
    out["q_row"] += q
    out["q_pos"] += q
    out["k_row"] += k
    out["k_pos"] += k
    out["q_rows"], out["k_rows"], out["size"] = q_rows, k_rows, q_rows
    out["pre"], out["next"] = 0, 0
    return out
