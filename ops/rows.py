"""Rows of a tensor on a device, given as a run or by number."""

from __future__ import annotations

from torch import Tensor, full_like

#: Rows of a tensor: a slice (a run), or int64 row numbers on the tensor's device.
RowIndex = slice | Tensor


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
