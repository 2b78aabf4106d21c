"""Where the results of kernel calls meet: outputs that are merged, gradients that are added.

A result that comes first is kept as it is, in the type of the operator: where one call computes everything, nothing is
cleared, converted or copied. Further results of kernels in 16 bits wait until there are four, and one kernel brings
them together: in fp32, rounded once at the end, with the accumulator read and written once instead of four times. Parts
in fp32, which are as large as the accumulator, and messages, whose buffers a plan counts, do not wait.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.merge import MAX_PARTS, merge_parts, sum_parts
from mindspeed_cp.ops.rows import PartRows, RowIndex, add_rows, put_rows, take_rows

#: All heads of a rank.
ALL_HEADS = slice(None)


def adds_in_one_kernel(x: Tensor) -> bool:
    """Return True if gradients on this device may wait for others, and be added by a kernel of the package: not on
    NPUs, where torch adds them, without triton-ascend."""
    return x.device.type != "npu"


def _implementation(x: Tensor) -> str | None:
    """Return what brings parts together on this device; of fake tensors, whose operators see the device meta, too."""
    return "torch" if x.device.type in ("cpu", "npu") else None


class Part(NamedTuple):
    """A result that waits: a tensor, where its rows belong, and the lse of an output."""

    x: Tensor
    rows: PartRows
    lse: Tensor | None = None

    @property
    def run(self) -> slice | None:
        """The rows of the whole tensor, if they are a run."""
        return None if self.rows.table is not None else slice(self.rows.first, self.rows.first + len(self.x))


class _Accumulator:
    """Parts of a tensor of `rows` rows that wait.

    Attributes:
        parts: at most MAX_PARTS.
    """

    def __init__(self, rows: int, heads: int) -> None:
        self._rows, self._heads = rows, heads
        self.parts: list[Part] = []

    def __len__(self) -> int:
        return self._rows

    def has_heads(self, heads: slice) -> bool:
        """Return True if these are all heads."""
        return heads.indices(self._heads) == (0, self._heads, 1)

    def _only_part(self, run: slice) -> Tensor | None:
        """Return the part that waits if there is no other and it has exactly these rows."""
        return self.parts[0].x if len(self.parts) == 1 and self.parts[0].run == run else None

    def _run(self, rows: RowIndex, heads: slice = ALL_HEADS) -> slice | None:
        """Return a run of rows with all heads as a slice from 0 on; None for other rows, or some heads."""
        return slice(*rows.indices(self._rows)[:2]) if isinstance(rows, slice) and self.has_heads(heads) else None

    @property
    def _all(self) -> slice:
        return slice(0, self._rows)


class OutputAccumulator(_Accumulator):
    """Attention outputs of a rank's queries and their lse, over the keys that calls have seen so far.

    Args:
        q: [t, heads, head_dim], queries of the rank.
        head_dim_v: width of a value.
        stores_all_rows: True if the first result of every row is stored, so that memory needs no initialization;
            otherwise rows are 0, with lse -inf, until there is a result.
    """

    def __init__(self, q: Tensor, head_dim_v: int, stores_all_rows: bool = False) -> None:
        super().__init__(*q.shape[:2])
        self._q, self._head_dim_v, self._stores_all_rows = q, head_dim_v, stores_all_rows
        self._total: tuple[Tensor, Tensor] | None = None

    def store(self, rows: RowIndex, heads: slice, out: Tensor, lse: Tensor) -> None:
        """Set rows that have no result yet. Neither tensor may be changed later.

        Args:
            rows: rows of the rank's queries.
            heads: heads of the rank.
            out: [rows, heads, head_dim_v], any floating type.
            lse: fp32 [rows, heads].
        """
        if self._total is None and not self.parts and self._run(rows, heads) == self._all:
            self._total = out.contiguous(), lse.contiguous()
            return
        for total, part in zip(self.fp32(), (out, lse), strict=True):
            put_rows(total[:, heads], rows, part)

    def merge_part(self, rows: PartRows, out: Tensor, lse: Tensor) -> None:
        """Merge a result over other keys, of all heads, now or later. Neither tensor may be changed later.

        Args:
            rows: rows of the rank's queries that the result has.
            out: [rows, heads, head_dim_v], any floating type.
            lse: fp32 [rows, heads].
        """
        self.parts.append(Part(rows.rows_that_count(out), rows, rows.rows_that_count(lse)))
        more = self._total is not None or len(self.parts) > 1
        if len(self.parts) == MAX_PARTS or (more and out.dtype == torch.float32):
            self.fp32()

    def fp32(self) -> tuple[Tensor, Tensor]:
        """Return out and lse to merge results into, fp32 [t, heads, head_dim_v] and [t, heads], contiguous."""
        if self.parts:
            self._merge(torch.float32)
        elif self._total is None:
            self._total = self._new()
        elif self._total[0].dtype != torch.float32:
            self._total = self._total[0].float(), self._total[1]
        assert self._total is not None
        return self._total

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return out in a type, and lse."""
        if self._total is None and self._only_part(self._all) is not None:
            (part,) = self.parts
            assert part.lse is not None
            self._total, self.parts = (part.x, part.lse), []
        if self.parts:
            self._merge(dtype)
        total = self._new() if self._total is None else self._total
        self._total = total[0].to(dtype), total[1]
        return self._total

    def _merge(self, dtype: torch.dtype) -> None:
        """Merge all parts that wait into a total of a type."""
        total = self._total
        reuses = total is not None and total[0].dtype == dtype == torch.float32
        shape = self._rows, self._heads
        out = torch.empty((*shape, self._head_dim_v), dtype=dtype, device=self._q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=self._q.device) if total is None else total[1]
        result = total if reuses and total is not None else (out, lse)
        tables, firsts = [part.rows.table for part in self.parts], [part.rows.first for part in self.parts]
        lses = [part.lse for part in self.parts if part.lse is not None]
        merge_parts(total, [part.x for part in self.parts], lses, tables, firsts, result, _implementation(out))
        self._total, self.parts = result, []

    def _new(self) -> tuple[Tensor, Tensor]:
        new = torch.empty if self._stores_all_rows else torch.zeros
        shape = self._rows, self._heads
        out = new((*shape, self._head_dim_v), dtype=torch.float32, device=self._q.device)
        return out, self._q.new_full(shape, float("-inf"), dtype=torch.float32)


class GradientAccumulator(_Accumulator):
    """The sum of gradients that several calls, and other ranks, have of a tensor's rows.

    Args:
        like: the tensor, [t, heads, dim].
    """

    def __init__(self, like: Tensor) -> None:
        super().__init__(*like.shape[:2])
        self._like = like
        self._sum: Tensor | None = None  # fp32, of all rows

    def add(self, rows: RowIndex, part: Tensor, heads: slice = ALL_HEADS) -> None:
        """Add to some rows. The part may be kept, and changed by later parts.

        Args:
            rows: rows of the tensor.
            part: [rows, heads, dim], any floating type.
            heads: heads of the tensor.
        """
        run = self._run(rows, heads)
        if run is None:
            add_rows(self.fp32()[:, heads], rows, part)
        elif len(part):
            self.add_part(PartRows(run.start), part)

    def add_arrived(self, rows: RowIndex, part: Tensor) -> None:
        """Add a message, which a plan counts in memory until it has been added: kept only if it becomes the sum."""
        if self._run(rows) == self._all and part.dtype == torch.float32 and self._sum is None:
            self._sum = part
        else:
            add_rows(self.fp32(), rows, part)

    def add_part(self, rows: PartRows, part: Tensor) -> None:
        """Add a part of all heads that a kernel has made, [rows, heads, dim], of any floating type, now or later. It
        may be kept, and changed."""
        self.parts.append(Part(rows.rows_that_count(part), rows))
        more = self._sum is not None or len(self.parts) > 1
        if len(self.parts) == MAX_PARTS or (more and (part.dtype == torch.float32 or not adds_in_one_kernel(part))):
            self.fp32()

    def clear(self, rows: RowIndex) -> None:
        """Forget what was added to some rows."""
        run = self._run(rows)
        if run == self._all or (self._sum is None and run is not None and self._only_part(run) is not None):
            self._sum, self.parts = None, []
        elif self._sum is not None or self.parts:
            put_rows(self.fp32(), rows, 0)

    def fp32(self) -> Tensor:
        """Return the sum of all rows to add to, fp32 of the tensor's shape, contiguous: 0 where nothing was added."""
        if self._sum is None and self.parts:
            first = self.parts[0]
            if first.run == self._all and first.x.dtype == torch.float32:
                self._sum = self.parts.pop(0).x
        if self.parts or self._sum is None:
            new = self._like.new_empty(self._like.shape, dtype=torch.float32) if self._sum is None else self._sum
            self._sum = self._added(new)
            self.parts = []
        return self._sum

    def rows(self, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        """Return the sum of some rows in a type: a view where possible."""
        run = self._run(rows)
        if self._sum is None and run is not None:
            part = self._only_part(run)
            if part is not None:
                return part.to(dtype)
            part = self._only_part(self._all)
            if part is not None:
                return part[run].to(dtype)
        return take_rows(self.fp32(), rows).to(dtype)

    def result(self, dtype: torch.dtype) -> Tensor:
        """Return the sum of all rows in a type."""
        part = self._only_part(self._all) if self._sum is None else None
        if part is not None:
            return part.to(dtype)
        if dtype == torch.float32:
            return self.fp32()
        if self.parts or self._sum is None:
            return self._added(torch.empty(self._like.shape, dtype=dtype, device=self._like.device))
        return self._sum.to(dtype)

    def _added(self, result: Tensor) -> Tensor:
        """Write the sum with all parts that wait to a tensor, which may be the sum itself, and return it."""
        if not self.parts:
            return result.zero_()
        tables, firsts = [part.rows.table for part in self.parts], [part.rows.first for part in self.parts]
        sum_parts(self._sum, [part.x for part in self.parts], tables, firsts, result, _implementation(result))
        return result


# Online-softmax merge of two partial attention results over disjoint keys.


#: Elements of `out` merged at a time on a CPU: 1 MiB in fp32, so that the converted part fits the cache of one core. On
#: a device all are merged at once, because launches cost more there.
CHUNK = 1 << 18


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into fp32 accumulators, in place.

    With w = exp(part_lse) / (exp(lse) + exp(part_lse)): out becomes out + w (part - out), lse the log of the sum of
    both exponentials (Milakov and Gimelshein 2018; Dao 2023). Nothing overflows, and rows without a visible key (lse
    -inf) on one or both sides stay exact, without NaN.

    Args:
        out: fp32 [t, heads, dim], updated.
        lse: fp32 [t, heads], updated.
        part: [t, heads, dim], any floating type.
        part_lse: fp32 [t, heads].
    """
    if out.device.type != "cpu":
        _merge_chunk(out, lse, part, part_lse)
        return
    rows = max(1, CHUNK // max(1, out[0].numel())) if len(out) else 1
    for chunks in zip(*(x.split(rows) for x in (out, lse, part, part_lse)), strict=True):
        _merge_chunk(*chunks)


def _merge_chunk(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    weight = torch.sigmoid(part_lse - lse)
    torch.nan_to_num_(weight, nan=0.0)  # -inf - -inf: no key on either side
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
