"""Where the results of kernel calls meet: outputs that are merged, gradients that are added.

A result that comes first is kept as it is, in the type of the operator: where one call computes everything, nothing is
cleared, converted or copied. Only when another result comes are they accumulated in fp32, and rounded once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp.ops.rows import RowIndex, add_rows, put_rows, take_rows

#: All heads of a rank.
ALL_HEADS = slice(None)


class OutputAccumulator:
    """Attention outputs of a rank's queries and their lse, over the keys that calls have seen so far.

    Args:
        q: [t, heads, head_dim], queries of the rank.
        head_dim_v: width of a value.
        stores_all_rows: True if the first result of every row is stored, so that memory needs no initialization;
            otherwise rows are 0, with lse -inf, until there is a result.
    """

    def __init__(self, q: Tensor, head_dim_v: int, stores_all_rows: bool = False) -> None:
        self._q, self._head_dim_v, self._stores_all_rows = q, head_dim_v, stores_all_rows
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def store(self, rows: RowIndex, heads: slice, out: Tensor, lse: Tensor) -> None:
        """Set rows that have no result yet. Neither tensor may be changed later.

        Args:
            rows: rows of the rank's queries.
            heads: heads of the rank.
            out: [rows, heads, head_dim_v], any floating type.
            lse: fp32 [rows, heads].
        """
        if self._out is None and _run_of(rows, heads, self._q) == slice(0, len(self._q)):
            self._out, self._lse = out.contiguous(), lse.contiguous()
            return
        for total, part in zip(self.fp32(), (out, lse), strict=True):
            put_rows(total[:, heads], rows, part)

    def fp32(self) -> tuple[Tensor, Tensor]:
        """Return out and lse to merge results into, fp32 [t, heads, head_dim_v] and [t, heads], contiguous."""
        if self._out is None or self._lse is None:
            self._out, self._lse = self._new()
        elif self._out.dtype != torch.float32:
            self._out = self._out.float()
        return self._out, self._lse

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return out in a type, and lse."""
        if self._out is None or self._lse is None:
            self._out, self._lse = self._new()
        return self._out.to(dtype), self._lse

    def _new(self) -> tuple[Tensor, Tensor]:
        rows, heads = self._q.shape[:2]
        new = torch.empty if self._stores_all_rows else torch.zeros
        out = new((rows, heads, self._head_dim_v), dtype=torch.float32, device=self._q.device)
        return out, self._q.new_full((rows, heads), float("-inf"), dtype=torch.float32)


class GradientAccumulator:
    """The sum of gradients that several calls, and other ranks, have of a tensor's rows.

    The first part is kept if it is one run of rows. With the second one the sum moves to fp32 memory for all rows, of
    which only the run that has a sum is written.

    Args:
        like: the tensor, [t, heads, dim].
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._all = slice(0, len(like))
        self._sum: Tensor | None = None  # fp32 memory of all rows, or the part that was kept
        self._rows = slice(0, 0)  # the run that has a sum; other rows are 0

    def add(self, rows: RowIndex, part: Tensor, heads: slice = ALL_HEADS) -> None:
        """Add to some rows. The part may be kept, and changed by later parts.

        Args:
            rows: rows of the tensor.
            part: [rows, heads, dim], any floating type.
            heads: heads of the tensor.
        """
        run = _run_of(rows, heads, self._like)
        if run is None:
            add_rows(self.fp32()[:, heads], rows, part)
        elif self._sum is None:
            self._rows, self._sum = run, part.contiguous()
        elif run == self._rows and part.dtype == torch.float32 != self._sum.dtype:
            self._sum = part.contiguous().add_(self._sum)
        elif run.start < run.stop:
            total, old = self._total(), self._rows
            low, high = max(run.start, min(run.stop, old.start)), min(run.stop, max(run.start, old.stop))
            total[low:high].add_(part[low - run.start : high - run.start])  # not +=, which copies the sum onto itself
            for a, b in ((run.start, low), (high, run.stop)):
                total[a:b] = part[a - run.start : b - run.start]
            total[old.stop : run.start], total[run.stop : old.start] = 0, 0
            self._rows = slice(min(run.start, old.start), max(run.stop, old.stop))

    def clear(self, rows: RowIndex) -> None:
        """Forget what was added to some rows."""
        if self._sum is None:
            return
        if _run_of(rows, ALL_HEADS, self._like) in (self._rows, self._all):
            self._sum = None
        else:
            put_rows(self.fp32(), rows, 0)

    def fp32(self) -> Tensor:
        """Return the sum of all rows to add to, fp32 of the tensor's shape, contiguous: 0 where nothing was added."""
        total = self._total()
        total[: self._rows.start], total[self._rows.stop :] = 0, 0
        self._rows = self._all
        return total

    def rows(self, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        """Return the sum of some rows in a type: a view where possible."""
        kept = self._sum is not None and self._rows in (self._all, _run_of(rows, ALL_HEADS, self._like))
        if self._sum is None or not kept:
            return take_rows(self.fp32(), rows).to(dtype)
        return (take_rows(self._sum, rows) if len(self._sum) == len(self._like) else self._sum).to(dtype)

    def result(self, dtype: torch.dtype) -> Tensor:
        """Return the sum of all rows in a type."""
        if self._sum is None:
            return torch.zeros_like(self._like, dtype=dtype, memory_format=torch.contiguous_format)
        return (self._sum if self._rows == self._all else self.fp32()).to(dtype)

    def _total(self) -> Tensor:
        """Return the sum in fp32 memory of all rows, of which those outside `_rows` are not written."""
        if self._sum is None:
            self._rows = slice(0, 0)
        elif len(self._sum) == len(self._like) and self._sum.dtype == torch.float32:
            return self._sum
        total = torch.empty(self._like.shape, dtype=torch.float32, device=self._like.device)
        if self._sum is not None:
            total[self._rows] = self._sum if len(self._sum) < len(self._like) else self._sum[self._rows]
        self._sum = total
        return total


def _run_of(rows: RowIndex, heads: slice, x: Tensor) -> slice | None:
    """Return a run of rows with all heads of a tensor as a slice from 0 on; None for other rows, or some heads."""
    if not isinstance(rows, slice) or heads.indices(x.shape[1]) != (0, x.shape[1], 1):
        return None
    start, stop, _ = rows.indices(x.shape[0])
    return slice(start, stop)
