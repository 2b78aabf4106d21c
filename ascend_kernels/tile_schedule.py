"""Tables that tell the tile kernels which tiles each block of rows visits, and how large blocks are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import next_power_of_2
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.plan import BAND, CAUSAL, AttentionConfig

#: Value of `low` (negated) and `high` where no diagonal cuts: larger than any context, no overflow in int32 sums.
NO_DIAGONAL = 2**30

#: (rows of a program's own block, rows of a block that it visits), by device type, bytes per element and kernel. The
#: own block has queries, in "dkdv" keys. GPUs: with LAUNCH_OPTIONS, the fastest or near it of those timed on an H200 at
#: 128 channels (benchmarks/results/kernels.md) that fit the 99 KiB of shared memory of compute
#: capability 8.6 and 8.9 there. NPUs: what fits their buffers by size; CANN's compiler has not seen them.
BLOCK_ROWS = {
    "cuda": {
        2: {"forward": (64, 64), "dq": (64, 64), "dkdv": (64, 64)},
        4: {"forward": (32, 32), "dq": (32, 32), "dkdv": (32, 32)},
    },
    "npu": {
        2: {"forward": (64, 64), "dq": (64, 32), "dkdv": (32, 64)},
        4: {"forward": (32, 32), "dq": (32, 32), "dkdv": (32, 32)},
    },
}

#: (warps, stages) of launches on GPUs, by bytes per element and kernel, for heads of up to 128 channels; of up to 256
#: channels in two bytes; and of others, which were not timed. triton-ascend reads neither.
LAUNCH_OPTIONS = {
    2: {"forward": (4, 3), "dq": (4, 2), "dkdv": (4, 2)},
    4: {"forward": (4, 2), "dq": (4, 2), "dkdv": (4, 2)},
}
WIDE_LAUNCH_OPTIONS, OTHER_LAUNCH_OPTIONS = (4, 2), (8, 2)

#: Maximum bytes of a block of heads wider than 128 channels, and the maximum number of channels: with twice as many
#: bytes "dkdv" spills up to three kilobytes.
BLOCK_BYTES, TILE_MAX_HEAD_DIM = 1 << 14, 512


def block_rows(kernel: str, dtype: torch.dtype, width: int = 128, device: str = "cuda") -> tuple[int, int]:
    """Return the rows of a program's own block and of a block that it visits.

    Args:
        kernel: "forward", "dq" or "dkdv".
        dtype: type of q, k and v.
        width: channels of a head.
        device: device type; types without an entry in BLOCK_ROWS use that of "cuda".
    """
    own, visited = BLOCK_ROWS.get(device, BLOCK_ROWS["cuda"])[dtype.itemsize][kernel]
    if width <= 128:
        return own, visited
    most_rows = max(16, BLOCK_BYTES // (next_power_of_2(width) * dtype.itemsize))
    return min(own, most_rows), min(visited, most_rows)


def launch_options(kernel: str, dtype: torch.dtype, width: int = 128) -> tuple[int, int]:
    """Return the warps and the stages of a launch; arguments as for :func:`block_rows`."""
    if width <= 128:
        return LAUNCH_OPTIONS[dtype.itemsize][kernel]
    return WIDE_LAUNCH_OPTIONS if width <= 256 and dtype.itemsize == 2 else OTHER_LAUNCH_OPTIONS


def schedule_block_rows(dtype: torch.dtype, backward: bool, width: int = 128, device: str = "cuda") -> tuple[int, int]:
    """Return the rows of a block of queries and of a block of keys for which schedules are made; arguments as for
    :func:`block_rows`. The forward uses the first number only."""
    kernels = ("dq", "dkdv") if backward else ("forward", "forward")
    rows, keys = (block_rows(kernel, dtype, width, device)[0] for kernel in kernels)
    return rows, keys


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """Tiles that each block of queries, or of keys, visits.

    Attributes:
        visits: int32 [visits, 8], grouped by block; columns in `device/tile_attention.py`.
        blocks: int32 [blocks, 4]: first row, first and last-plus-one visit, 0; longest block first.
        rows: rows of a block.
        tiles: int64 [tiles, 8], the tiles themselves, for the torch implementation.
    """

    visits: Tensor
    blocks: Tensor
    rows: int
    tiles: np.ndarray

    @staticmethod
    def of(
        tiles: np.ndarray, attention: AttentionConfig, rows: int, side: str = "q", device: torch.device | str = "cpu"
    ) -> TileSchedule:
        """Build the schedule for the tiles of one (step, slot).

        Args:
            tiles: records of dtype TILE.
            attention: its window applies to tiles with mask BAND.
            rows: rows of a block.
            side: "q" or "k": blocks of queries or of keys.
            device: device of the tables.
        """
        table = _tile_table(tiles, attention)
        column = 0 if side == "q" else 2
        first, count = table[:, column], table[:, column + 1]
        begin, end = first // rows, (first + count - 1) // rows + 1
        block = ragged_arange(begin, end - begin)
        tile = np.repeat(np.arange(len(table)), end - begin)
        order = np.argsort(block, kind="stable")
        block, tile = block[order], tile[order]
        starts = np.flatnonzero(np.diff(block, prepend=-1))
        stops = np.append(starts[1:], len(block))[: len(starts)]
        work = np.add.reduceat(_visited_rows(table[tile], block * rows, rows, side), starts) if len(starts) else starts
        longest = np.argsort(-work, kind="stable")
        blocks = np.stack([block[starts] * rows, starts, stops, np.zeros_like(starts)], 1)[longest]
        visits, on_device = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (table[tile], blocks))
        return TileSchedule(visits, on_device, rows, table)


def _visited_rows(table: np.ndarray, start: np.ndarray, rows: int, side: str) -> np.ndarray:
    """Return, for each visit, how many rows of the other side the block from row `start` on meets."""
    q_row, q_rows, k_row, k_rows, low, high = table[:, :6].T
    own_row, own_rows, other_rows = (q_row, q_rows, k_rows) if side == "q" else (k_row, k_rows, q_rows)
    first, last = np.maximum(start - own_row, 0), np.minimum(start - own_row + rows, own_rows) - 1
    begin, end = (first + low, last + high) if side == "q" else (first - high, last - low)
    return np.maximum(np.minimum(end + 1, other_rows) - np.maximum(begin, 0), 0)


def _tile_table(tiles: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Return int64 [tiles, 8]: q_row, q_rows, k_row, k_rows, low, high, distance, document."""
    left, right = attention.visible_range
    distance = tiles["q_pos"] - tiles["k_pos"]
    band, causal = tiles["mask"] == BAND, tiles["mask"] == CAUSAL
    low = np.where(band, distance - left, -NO_DIAGONAL).clip(-NO_DIAGONAL, NO_DIAGONAL)
    high = np.where(band, distance + right, np.where(causal, tiles["k_rows"] - tiles["q_rows"], NO_DIAGONAL))
    rows = [tiles[name] for name in ("q_row", "q_rows", "k_row", "k_rows")]
    return np.stack([*rows, low, high.clip(-NO_DIAGONAL, NO_DIAGONAL), distance, tiles["doc"]], 1)
