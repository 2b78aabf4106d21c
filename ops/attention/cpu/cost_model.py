"""Cost model of torch's CPU kernels, which decides how tiles are cut.

The flash kernels process 32 queries at a time in calls of fewer than 192 queries, 64 below 768 and 256 from 768 on;
more is faster. Their own causal mask skips keys in blocks of 512; a mask argument skips none. High strips therefore
waste more work in their corners, and squares pay for their additional calls from about 768 rows on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from mindspeed_cp.ops.attention.cpu.arithmetic import computes_in
from mindspeed_cp.ops.attention.cpu.tile_regions import TileRegion
from mindspeed_cp.plan import AttentionConfig

#: Nanoseconds for one (query, key) pair of 8 heads x 64 in one thread, by queries of the call: below 192, below 768,
#: and more. Only ratios matter.
NS_PER_PAIR = {
    ("half", "forward"): (8.5, 6.0, 5.4),
    ("half", "backward"): (56.0, 38.0, 26.0),
    ("single", "forward"): (22.0, 19.0, 16.0),
    ("single", "backward"): (50.0, 43.0, 41.0),
}
#: Slow-down of a pair by a mask argument.
MASK_FACTOR = {"forward": 1.12, "backward": 1.03}
#: Nanoseconds for one call, for one of its keys (packing; adding gradients), and for one more part of a row (merging).
NS_PER_CALL = {"forward": 60_000.0, "backward": 120_000.0}
NS_PER_KEY = {"forward": 100.0, "backward": 900.0}
NS_PER_MERGED_ROW = {"forward": 600.0, "backward": 200.0}
#: Maximum number of masked keys that the kernel computes for each row of a causal square.
CAUSAL_WASTE = 384

#: Candidate numbers of rows: multiples of what the kernels process at a time.
STRIP_ROWS = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
SQUARE_ROWS = (768, 1024, 2048, 4096)

#: The flash backward of calls with at most this many pairs, or fewer than 192 queries, is faster in fp32 than in bf16
#: and fp16 (twice as fast if both are small), unless more keys than UPCAST_KEYS make the copies expensive. Up to
#: UPCAST_QUERIES it is slower by the eighth that the figures above say, and the gradients are not rounded in each call.
UPCAST_PAIRS, UPCAST_QUERIES, UPCAST_KEYS = 1 << 16, 767, 1 << 13


@dataclass(frozen=True)
class CpuCostModel:
    """Costs of one kernel.

    Attributes:
        direction: "forward" or "backward".
        half: bf16 or fp16.
        work: work of a pair relative to 8 heads x 64.
        native: False if inputs are bf16 or fp16 and the CPU has no instructions for them: all calls are in fp32.
        windowed: True under a window. Backward calls are then in fp32: a window's calls are so small on one rank that
            they are in fp32 anyway, and larger ones on other ranks would have up to 1.4 times the error.
    """

    direction: str
    half: bool
    work: float
    native: bool = True
    windowed: bool = False

    @staticmethod
    def for_kernel(direction: str, attention: AttentionConfig, dtype: torch.dtype) -> CpuCostModel:
        """Return the costs of the kernel for an attention and a type."""
        work = attention.heads * (attention.head_dim + attention.head_dim_v) / 1024
        windowed = attention.window is not None
        return CpuCostModel(direction, dtype != torch.float32, work, computes_in(dtype), windowed)

    @property
    def single(self) -> bool:
        """True if all calls are in fp32."""
        return not self.half or not self.native or (self.windowed and self.direction == "backward")

    @overload
    def upcasts(self, queries: int, keys: int, merged: bool) -> bool: ...

    @overload
    def upcasts(self, queries: np.ndarray, keys: np.ndarray, merged: np.ndarray) -> np.ndarray: ...

    def upcasts(self, queries: Any, keys: Any, merged: Any) -> Any:
        """Return True for calls that are computed in fp32 although their inputs are bf16 or fp16.

        Args:
            queries, keys: size of the call.
            merged: True if another call writes some of its rows. Its output is then not rounded before it is merged.
        """
        small = (queries * keys <= UPCAST_PAIRS) | ((queries <= UPCAST_QUERIES) & (keys <= UPCAST_KEYS))
        return ((small if self.direction == "backward" else merged) | self.single) & self.half

    def cut(self, region: TileRegion, square_rows: int) -> tuple[bool, int]:
        """Choose the cheapest cut of a region.

        Args:
            region: visible part of a tile.
            square_rows: maximum rows of a square; 0: no squares.

        Returns:
            True for squares, False for strips, and the rows of each.
        """
        if not region.edges:
            return False, region.rows
        middle = region.rows // 2
        counts = [b - a for a, b in map(region.visible_keys, (0, middle, middle, region.rows - 1))]
        mean = sum(counts) / len(counts)
        square_rows = min(square_rows, region.width - 1)
        candidates = [(self._strip(region, mean, min(rows, region.rows)), False, rows) for rows in STRIP_ROWS]
        if square_rows >= SQUARE_ROWS[0]:
            sizes = {min(rows, square_rows, region.rows) for rows in SQUARE_ROWS}
            candidates += [(self._square(region, mean, rows), True, rows) for rows in sizes]
        return min(candidates)[1:]

    def _strip(self, region: TileRegion, mean: float, rows: int) -> float:
        """Return the nanoseconds of a row with `mean` visible keys, in strips."""
        return self._call(rows, min(region.keys, mean + region.edges * rows / 2)) * MASK_FACTOR[self.direction]

    def _square(self, region: TileRegion, mean: float, rows: int) -> float:
        """Return the nanoseconds of a row with `mean` visible keys, in squares."""
        triangle = self._call(rows, min(rows, rows / 2 + CAUSAL_WASTE))
        inner = max(0.0, mean - region.edges * rows / 2)
        parts = region.edges + (inner > 0) - 1
        return (
            region.edges * triangle + (inner > 0) * self._call(rows, inner) + parts * NS_PER_MERGED_ROW[self.direction]
        )

    def _call(self, rows: int, keys: float) -> float:
        """Return the nanoseconds of one row of a call."""
        pair = NS_PER_PAIR["single" if self.single else "half", self.direction][(rows >= 192) + (rows >= 768)]
        return self.work * keys * (pair + NS_PER_KEY[self.direction] / rows) + NS_PER_CALL[self.direction] / rows
