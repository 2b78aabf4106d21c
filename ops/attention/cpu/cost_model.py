"""What torch's CPU kernels cost, and so how tiles are best cut. Measured by `python -m benchmarks.kernels_cpu`.

The flash kernels work on 32 queries at a time where a call has fewer than 192, on 64 up to 767 and on 256 from 768 on,
and are the faster the more. Their own causal mask skips keys by 512, a mask that is given skips none: so strips compute
their corners in vain, the more the higher they are, and squares are worth their additional calls from some 768 rows on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from mindspeed_cp.ops.attention.regions import Region
from mindspeed_cp.plan import AttentionConfig

#: Nanoseconds for one (query, key) pair of 8 heads x 64 in one thread, by queries of the call: below 192, below 768,
#: and more. Only ratios count.
PAIR = {
    ("half", "forward"): (8.5, 6.0, 5.4),
    ("half", "backward"): (56.0, 38.0, 26.0),
    ("single", "forward"): (22.0, 19.0, 16.0),
    ("single", "backward"): (50.0, 43.0, 41.0),
}
#: A mask makes a pair so much slower.
MASKED = {"forward": 1.12, "backward": 1.03}
#: Nanoseconds for one call, for one of its keys (packing; adding the gradients), for one more part of a row (merging).
CALL = {"forward": 60_000.0, "backward": 120_000.0}
KEY = {"forward": 100.0, "backward": 900.0}
PART = {"forward": 600.0, "backward": 200.0}
#: Keys that the causal mask of the kernel computes in vain for each row of a square, at most.
CAUSAL_WASTE = 384

#: Rows that are worth trying: multiples of what the kernels work on at a time.
STRIPS = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
SQUARES = (768, 1024, 2048, 4096)

#: The flash backward of a call of so few pairs, or of so few queries, takes less time in fp32 than in bf16 and fp16,
#: half of it where both are small; not with so many keys that the copies count.
UPCAST_PAIRS, UPCAST_QUERIES, UPCAST_KEYS = 1 << 16, 128, 1 << 13


@dataclass(frozen=True)
class Costs:
    """Costs of one kernel.

    Attributes:
        direction: "forward" or "backward".
        half: bf16 or fp16.
        work: of a pair, relative to 8 heads x 64.
    """

    direction: str
    half: bool
    work: float

    @staticmethod
    def of(direction: str, attention: AttentionConfig, dtype: torch.dtype) -> Costs:
        """Costs of the kernel for that attention and type."""
        work = attention.heads * (attention.head_dim + attention.head_dim_v) / 1024
        return Costs(direction, dtype != torch.float32, work)

    @overload
    def upcasts(self, queries: int, keys: int) -> bool: ...

    @overload
    def upcasts(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray: ...

    def upcasts(self, queries: Any, keys: Any) -> Any:
        """Whether such a call, or each of such calls, is computed in fp32 although its inputs are not."""
        small = (queries * keys <= UPCAST_PAIRS) | ((queries <= UPCAST_QUERIES) & (keys <= UPCAST_KEYS))
        return small & (self.half and self.direction == "backward")

    def cut(self, region: Region, square_rows: int) -> tuple[bool, int]:
        """How to cut a region so that it is the cheapest.

        Args:
            region: the region.
            square_rows: squares may have so many rows; 0: there may be none.

        Returns:
            Whether into squares or into strips, and the rows of each.
        """
        if not region.edges:
            return False, region.rows
        middle = region.rows // 2
        seen = [b - a for a, b in map(region.seen_by, (0, middle, middle, region.rows - 1))]
        mean = sum(seen) / len(seen)
        square_rows = min(square_rows, region.width - 1)
        tries = [(self._strip(region, mean, min(rows, region.rows)), False, rows) for rows in STRIPS]
        if square_rows >= SQUARES[0]:
            choices = {min(rows, square_rows, region.rows) for rows in SQUARES}
            tries += [(self._square(region, mean, rows), True, rows) for rows in choices]
        return min(tries)[1:]

    def _strip(self, region: Region, mean: float, rows: int) -> float:
        """Nanoseconds of a row that sees `mean` keys, in strips."""
        return self._call(rows, min(region.keys, mean + region.edges * rows / 2)) * MASKED[self.direction]

    def _square(self, region: Region, mean: float, rows: int) -> float:
        """The same in squares."""
        triangle = self._call(rows, min(rows, rows / 2 + CAUSAL_WASTE))
        inner = max(0.0, mean - region.edges * rows / 2)
        parts = region.edges + (inner > 0) - 1
        return region.edges * triangle + (inner > 0) * self._call(rows, inner) + parts * PART[self.direction]

    def _call(self, rows: int, keys: float) -> float:
        """Nanoseconds of one row of a call."""
        pair = PAIR["half" if self.half else "single", self.direction][(rows >= 192) + (rows >= 768)]
        return self.work * keys * (pair + KEY[self.direction] / rows) + CALL[self.direction] / rows
