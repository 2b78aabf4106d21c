"""Masks and biases by position, without a tensor of queries x keys.

Whether a query sees a key, and the ALiBi bias of the two, depend on their distance alone. So the mask of a tile is a
view of one table of distances: with the queries in descending order,

    mask[i, j] = table[i + j]                         table   9  8  7  6  5  4 ...   distance: query - key

    last query       9  8  7  6
    the one before   8  7  6  5        stride 1 in both directions
    ...              7  6  5  4

which takes n + m - 1 numbers for n queries and m keys, is exact (every bias is rounded once, however far the key), and
stays in the cache while a kernel reads it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.plan import AttentionConfig

#: Tables for distances up to this are kept; a tile that reaches farther gets one of its own.
NEAR = 1 << 13


def distance_mask(attention: AttentionConfig, heads: tuple[int, int], reach: int, queries: int, keys: int) -> Tensor:
    """Additive mask of a tile whose queries are in DESCENDING order of position.

    Args:
        attention: its mask, window and slopes count.
        heads: first and last-plus-one query head, for the slopes.
        reach: position of the last query minus position of the first key.
        queries: rows of the tile.
        keys: columns of the tile.

    Returns:
        fp32 [1, heads, queries, keys], or [1, 1, queries, keys] without ALiBi: minus infinity where the query does not
        see the key, else -slope * |query position - key position|. A view: neither change nor keep it.
    """
    last = reach - (queries + keys - 2)
    if max(reach, -last) <= NEAR:
        table, first = _near(attention, heads), NEAR - reach
    else:
        table, first = _table(attention, heads, reach, last), 0
    many, length = table.shape
    return torch.from_numpy(table).as_strided((1, many, queries, keys), (0, length, 1, 1), first)


@lru_cache(maxsize=16)
def _near(attention: AttentionConfig, heads: tuple[int, int]) -> np.ndarray:
    """The table that is kept. An array: a tensor would stay what the first caller's default type, default device or
    dispatch mode had made of it."""
    return _table(attention, heads, NEAR, -NEAR)


def _table(attention: AttentionConfig, heads: tuple[int, int], first: int, last: int) -> np.ndarray:
    """fp32 [heads or 1, distances] for the distances first, first - 1 .. last."""
    distance = np.arange(first, last - 1, -1, dtype=np.int64)
    if attention.slopes is None:
        table = np.zeros((1, len(distance)), np.float32)
    else:
        table = (attention.slopes[slice(*heads), None] * -np.abs(distance)).astype(np.float32)
    left, right = attention.reach
    table[:, (distance > left) | (distance < -right)] = -np.inf
    return table
