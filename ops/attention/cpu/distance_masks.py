"""Masks and biases by position, without a tensor of queries x keys.

Visibility and ALiBi bias of a (query, key) pair depend on their distance only. The mask of a tile is therefore a view
of one table of distances: with the queries in descending order,

    mask[i, j] = table[i + j]                         table   9  8  7  6  5  4 ...   distance: query - key

    last query       9  8  7  6
    the one before   8  7  6  5        stride 1 in both directions
    ...              7  6  5  4

The table has n + m - 1 numbers for n queries and m keys, is exact (every bias is rounded once, at any distance), and
stays in the cache while a kernel reads it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.plan import AttentionConfig

#: Maximum distance of cached tables; a tile with larger distances gets a table of its own.
CACHED_REACH = 1 << 13


def distance_mask(attention: AttentionConfig, heads: tuple[int, int], reach: int, queries: int, keys: int) -> Tensor:
    """Return the additive mask of a tile whose queries are in DESCENDING order of position.

    Args:
        attention: mask, window and slopes.
        heads: first and last-plus-one query head, for the slopes.
        reach: position of the last query minus position of the first key.
        queries: rows of the tile.
        keys: columns of the tile.

    Returns:
        fp32 [1, heads, queries, keys], or [1, 1, queries, keys] without ALiBi: -inf where the key is not
        visible, else -slope * |query position - key position|. A view: do not modify or keep it.
    """
    last = reach - (queries + keys - 2)
    if max(reach, -last) <= CACHED_REACH:
        table, first = _cached_table(attention, heads), CACHED_REACH - reach
    else:
        table, first = _table(attention, heads, reach, last), 0
    tables, length = table.shape
    return torch.from_numpy(table).as_strided((1, tables, queries, keys), (0, length, 1, 1), first)


@lru_cache(maxsize=16)
def _cached_table(attention: AttentionConfig, heads: tuple[int, int]) -> np.ndarray:
    """Return the cached table, as an array: a tensor would depend on the default type, default device or dispatch mode
    of its first user."""
    return _table(attention, heads, CACHED_REACH, -CACHED_REACH)


def _table(attention: AttentionConfig, heads: tuple[int, int], first: int, last: int) -> np.ndarray:
    """Return fp32 [heads or 1, distances] for the distances first, first - 1 .. last."""
    distance = np.arange(first, last - 1, -1, dtype=np.int64)
    if attention.slopes is None:
        table = np.zeros((1, len(distance)), np.float32)
    else:
        table = (attention.slopes[slice(*heads), None] * -np.abs(distance)).astype(np.float32)
    left, right = attention.visible_range
    table[:, (distance > left) | (distance < -right)] = -np.inf
    return table
