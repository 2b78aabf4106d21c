"""Where the results of a call belong: rows of accumulators that are a run, or have numbers."""

from __future__ import annotations

from torch import Tensor, full_like

from mindspeed_cp.ops.attention.npu_placed import Index, PlacedBack


def put(x: Tensor, rows: Index, values: Tensor | float) -> None:
    """Set some rows."""
    if isinstance(rows, slice):
        x[rows] = values
    elif isinstance(values, Tensor):
        x.index_copy_(0, rows, values)
    else:  # not index_fill_: where CANN lacks it, torch_npu asks the device for every row number
        x.index_copy_(0, rows, full_like(x[:1], values).expand(len(rows), *x.shape[1:]))


def add_to(sums: tuple[Tensor, ...], back: PlacedBack, results: tuple[Tensor, ...]) -> None:
    """Add a call's gradients to the sums."""
    if back.folds:
        results = tuple(x.float() for x in results)
    results = back.fold(results, _plus)
    for total, some in zip(sums, results, strict=True):
        if isinstance(back.target, slice):
            total[back.target] += some
        else:
            total.index_add_(0, back.target, some.to(total.dtype))


def _plus(into: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> None:
    for x, y in zip(into, more, strict=True):
        x += y
