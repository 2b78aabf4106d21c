"""Costs that always choose the same cut, so that tests cut small tiles as large ones are cut."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_cp.ops.attention.cpu.cost_model import CpuCostModel
from mindspeed_cp.ops.attention.cpu.tile_regions import TileRegion


@dataclass(frozen=True)
class Cut(CpuCostModel):
    """Squares or strips of `rows` rows; squares wherever they are possible at all."""

    squares: bool = False
    rows: int = 4

    def cut(self, region: TileRegion, square_rows: int) -> tuple[bool, int]:
        square_rows = min(square_rows, region.width - 1)
        squares = self.squares and square_rows > 0
        return squares, min(self.rows, square_rows) if squares else self.rows
