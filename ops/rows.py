"""Rows of a tensor on a device, given as a run or by number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, full_like

#: Rows of a tensor: a slice (a run), or int64 row numbers on the tensor's device.
RowIndex = slice | Tensor


@dataclass(frozen=True, eq=False)
class PartRows:
    """The rows of a tensor that a part of it has.

    Attributes:
        first: without a table, the row of the tensor that the part's first row belongs to.
        table: the part's row for each row of the tensor, or -1, int32 on its device; None: a run.
        source: without a table, rows of the part that count; None: all.
    """

    first: int
    table: Tensor | None = None
    source: slice | None = None

    def rows_that_count(self, part: Tensor) -> Tensor:
        """Return the rows of a part that tables and runs count, contiguous; the part itself if it can be."""
        return (part if self.source is None or self.source == slice(0, len(part)) else part[self.source]).contiguous()

    @staticmethod
    def of(source: RowIndex, target: RowIndex, rows: int, device: torch.device) -> PartRows:
        """Return the rows of a part whose rows `source` are the rows `target`, pairwise different, of `rows` rows."""
        if isinstance(source, slice) and isinstance(target, slice):
            return PartRows(target.indices(rows)[0], source=source)
        if isinstance(source, slice):
            source = torch.arange(source.start, source.stop, device=device)
        table = torch.full((rows,), -1, dtype=torch.int32, device=device)
        table[target] = source.int()
        return PartRows(0, table)


def take_rows(x: Tensor, rows: RowIndex) -> Tensor:
    """Return some rows of ``x``: a view for a slice, a copy for row numbers."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def add_rows(x: Tensor, rows: RowIndex, values: Tensor) -> None:
    """Add to some rows of ``x`` in place; row numbers may repeat."""
    if isinstance(rows, slice):
        x[rows].add_(values)
    else:
        x.index_add_(0, rows, values.to(x.dtype))


def put_rows(x: Tensor, rows: RowIndex, values: Tensor | float) -> None:
    """Set some rows of ``x`` in place."""
    if isinstance(rows, slice):
        x[rows] = values
    elif isinstance(values, Tensor):
        x.index_copy_(0, rows, values.to(x.dtype))
    else:  # not index_fill_: where CANN lacks it, torch_npu reads every row number back from the device
        x.index_copy_(0, rows, full_like(x[:1], values).expand(len(rows), *x.shape[1:]))
