"""HostRows and masks of a call on a device: built once for a batch, used by every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, adds_in_one_kernel
from mindspeed_cp.ops.attention.lowering.fused_call import FusedCall, HostRows, ScatterRows
from mindspeed_cp.ops.rows import PartRows, RowIndex, take_rows
from mindspeed_cp.plan import AttentionConfig

#: Merges rows into rows in place: (tensors to merge into, tensors to merge from).
MergeRows = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]


@dataclass(frozen=True, eq=False)
class DeviceScatter:
    """ScatterRows on a device."""

    merges: tuple[tuple[RowIndex, RowIndex], ...]
    source: RowIndex
    target: RowIndex
    device: torch.device
    cache: dict[int, PartRows] = field(default_factory=dict, repr=False)

    def part_rows(self, rows: int) -> PartRows:
        """Return which rows of a result belong to which of the `rows` rows of the tensor; built at the first use."""
        if rows not in self.cache:
            self.cache[rows] = PartRows.of(self.source, self.target, rows, self.device)
        return self.cache[rows]

    def merge_duplicates(self, results: tuple[Tensor, ...], merge: MergeRows) -> None:
        """Merge the rows of a result that belong to the same target row, so that `source` has one for each target.

        Args:
            results: tensors with the rows of the call; changed in place.
            merge: merges rows.
        """
        for into, source in self.merges:
            merged = tuple(take_rows(x, into) for x in results)
            merge(merged, tuple(take_rows(x, source) for x in results))
            if isinstance(into, Tensor):
                for x, rows in zip(results, merged, strict=True):
                    x.index_copy_(0, into, rows)

    def add_to(self, sums: tuple[GradientAccumulator, ...], results: tuple[Tensor, ...], heads: slice) -> None:
        """Add the gradients of a call to the sums, to these heads."""
        if self.merges:
            results = tuple(x.float() for x in results)
            self.merge_duplicates(results, _add_each)
        for total, part in zip(sums, results, strict=True):
            if total.has_heads(heads) and adds_in_one_kernel(part):
                total.add_part(self.part_rows(len(total)), part)
            else:
                total.add(self.target, take_rows(part, self.source), heads)


@dataclass(frozen=True, eq=False)
class DeviceCall:
    """A FusedCall on a device; attributes as there.

    Attributes:
        device: the device.
        unwritten: rows to clear before results are merged; None: no rows, or all rows (results are then stored).
        bias_shift: fp32 [rows, 1], or None.
        visible_ranges: None with the compressed mask, or where every key is visible.
    """

    device: torch.device
    q: RowIndex
    k: RowIndex
    q_scatter: DeviceScatter
    k_scatter: DeviceScatter
    unwritten: RowIndex | None
    padding: RowIndex | None
    bias_shift: Tensor | None
    uses_compressed_mask: bool
    visible_ranges: Tensor | None

    def mask(self, keys: int) -> Tensor | None:
        """Return the mask (True is hidden), or None if every key is visible.

        A mask from visible_ranges is built for every call and freed after it: kept with a plan, the masks of all steps
        would be as large as the matrix that context parallelism avoids."""
        if self.uses_compressed_mask:
            return compressed_mask(self.device)
        if self.visible_ranges is None:
            return None
        column = torch.arange(keys, device=self.device)
        hidden = torch.ones(self.visible_ranges.shape[-1], keys, dtype=torch.bool, device=self.device)
        for first, last in self.visible_ranges[..., None]:
            hidden &= (column < first) | (column >= last)
        return hidden


def on_device(call: FusedCall, device: torch.device) -> DeviceCall:
    """Return the call on a device; built at the first use."""
    if device not in call.device_cache:
        call.device_cache[device] = DeviceCall(
            device,
            _rows(call.q, device),
            _rows(call.k, device),
            _scatter(call.q_scatter, device),
            _scatter(call.k_scatter, device),
            None if isinstance(call.unwritten, bool) or not len(call.unwritten) else _rows(call.unwritten, device),
            None if call.padding is None else _rows(call.padding, device),
            None
            if call.bias_shift is None
            else torch.from_numpy(call.bias_shift.astype(np.float32)).to(device)[:, None],
            call.uses_compressed_mask,
            None
            if call.uses_compressed_mask or call.visible_ranges is None
            else torch.from_numpy(call.visible_ranges).to(device),
        )
    return call.device_cache[device]


@lru_cache(maxsize=64)
def slopes_of(attention: AttentionConfig, heads: tuple[int, int], device: torch.device) -> Tensor | None:
    """Return the ALiBi slopes of heads[0] .. heads[1] - 1, fp32; None without ALiBi."""
    if attention.slopes is None:
        return None
    return torch.from_numpy(attention.slopes[slice(*heads)].astype(np.float32)).to(device)


@lru_cache(maxsize=16)
def compressed_mask(device: torch.device) -> Tensor:
    """Return the mask of sparse modes 2 to 4: bool [2048, 2048], True above the diagonal."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


_ones: dict[torch.device, Tensor] = {}


def ones(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return read-only fp32 ones: a view of one shared tensor that grows to the largest requested size."""
    size = prod(shape)
    if device not in _ones or len(_ones[device]) < size:
        _ones[device] = torch.ones(size, device=device)
    return _ones[device][:size].view(shape)


def _rows(rows: HostRows, device: torch.device) -> RowIndex:
    return rows if isinstance(rows, slice) else torch.from_numpy(np.ascontiguousarray(rows)).to(device)


def _scatter(scatter: ScatterRows, device: torch.device) -> DeviceScatter:
    merges = tuple((_rows(into, device), _rows(source, device)) for into, source in scatter.merges)
    return DeviceScatter(merges, _rows(scatter.source, device), _rows(scatter.target, device), device)


def _add_each(into: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> None:
    for x, y in zip(into, more, strict=True):
        x += y
