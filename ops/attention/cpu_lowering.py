"""From tiles to calls of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.plan import CAUSAL

#: Backward tiles of at most this many rows and keys are computed in groups: the flash backward has a fixed cost for
#: every (tile, head), 65 us where it was measured, which only larger tiles outweigh (benchmarks/kernels_cpu.py).
SMALL = 64

#: Scores of one group for one head: 2**16 in fp32 are 256 KiB a head, so a group of all heads stays in the caches.
GROUP_SCORES = 1 << 16


@dataclass(frozen=True)
class Call:
    """One call of the flash kernel, whose causal mask is aligned top left: square calls only are causal.

    Attributes:
        q: rows of queries.
        k: rows of the slot.
        causal: lower triangle, or all.
        first: no call before has touched these rows, so its result is stored and not merged.
    """

    q: slice
    k: slice
    causal: bool
    first: bool


@dataclass(frozen=True)
class Group:
    """Small backward tiles of one step and slot, padded to one shape and computed by batched matrix products.

    Attributes:
        q_rows: int64 [tiles * q], rows of queries; padding repeats a valid row of the tile.
        k_rows: int64 [tiles * k], rows of the slot, padded alike.
        shape: tiles, q, k.
        hidden: fp32 [tiles, 1, q, k]: -inf where a query does not see a key and in all padding, else 0.
    """

    q_rows: Tensor
    k_rows: Tensor
    shape: tuple[int, int, int]
    hidden: Tensor


Lowering = dict[tuple[int, int], list[Call | Group]]


def lower(tiles: np.ndarray, rows: int, small: int) -> Lowering:
    """Calls for every (step, slot).

    Args:
        tiles: records of dtype TILE in the order they run.
        rows: the rank's queries.
        small: tiles of at most this many rows and keys are grouped; 0 for none.
    """
    out: Lowering = {}
    if not len(tiles):
        return out
    touched = np.zeros(rows, bool)
    key = np.stack([tiles["step"], tiles["slot"]], 1)
    starts = np.flatnonzero(np.append(True, (key[1:] != key[:-1]).any(1)))
    for first, last in zip(starts, np.append(starts[1:], len(tiles)), strict=True):
        part = tiles[first:last]
        calls = out.setdefault((int(part["step"][0]), int(part["slot"][0])), [])
        grouped = np.maximum(part["q_rows"], part["k_rows"]) <= small
        for tile in part[~grouped]:
            calls.extend(_calls(tile, touched))
        calls.extend(_groups(part[grouped]))
    return out


def _calls(tile: np.ndarray, touched: np.ndarray) -> Iterator[Call]:
    """A causal tile with more keys than queries is a full call on the keys that all see, and a causal square."""
    q_row, q_rows, k_row, k_rows = (int(tile[name]) for name in ("q_row", "q_rows", "k_row", "k_rows"))
    q, past = slice(q_row, q_row + q_rows), k_rows - q_rows
    if tile["mask"] == CAUSAL:
        pieces = [(slice(k_row, k_row + past), False)] if past else []
        pieces.append((slice(k_row + past, k_row + k_rows), True))
    else:
        pieces = [(slice(k_row, k_row + k_rows), False)]
    for k, causal in pieces:
        yield Call(q, k, causal, not touched[q].any())
        touched[q] = True


def _groups(tiles: np.ndarray) -> Iterator[Group]:
    """Tiles by size (next power of two, 8 at least), so that padding at most doubles each side."""
    if not len(tiles):
        return
    size = np.maximum(8, 1 << np.ceil(np.log2(np.maximum(tiles["q_rows"], tiles["k_rows"]))).astype(np.int64))
    for n in np.unique(size):
        members = tiles[size == n]
        at_once = max(1, GROUP_SCORES // int(n) ** 2)
        for i in range(0, len(members), at_once):
            yield _group(members[i : i + at_once])


def _group(tiles: np.ndarray) -> Group:
    q, k = int(tiles["q_rows"].max()), int(tiles["k_rows"].max())
    i, j = np.arange(q), np.arange(k)
    q_rows = tiles["q_row"][:, None] + np.minimum(i, tiles["q_rows"][:, None] - 1)
    k_rows = tiles["k_row"][:, None] + np.minimum(j, tiles["k_rows"][:, None] - 1)
    past = np.where(tiles["mask"] == CAUSAL, tiles["k_rows"] - tiles["q_rows"], k)[:, None, None]
    sees = (
        (i[:, None] < tiles["q_rows"][:, None, None]) & (j < tiles["k_rows"][:, None, None]) & (j <= past + i[:, None])
    )
    hidden = torch.zeros(len(tiles), 1, q, k).masked_fill_(torch.from_numpy(~sees)[:, None], float("-inf"))
    q_flat, k_flat = (torch.from_numpy(x.astype(np.int64).reshape(-1)) for x in (q_rows, k_rows))
    return Group(q_flat, k_flat, (len(tiles), q, k), hidden)
