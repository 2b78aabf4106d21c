"""A call's rows, masks and statistics on a device: made once for a batch, used by every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ops.attention.npu_calls import Back, FusedCall, Rows
from mindspeed_cp.ops.attention.npu_statistics import Order
from mindspeed_cp.plan import AttentionConfig

#: Rows on a device: a run, or row numbers.
Index = slice | Tensor

#: Adds the second and further tensors into the first ones: (rows of the first, tensors into, tensors from).
Join = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]


@dataclass(frozen=True, eq=False)
class PlacedBack:
    """Back, on a device."""

    folds: tuple[tuple[Index, Index], ...]
    source: Index
    target: Index

    def fold(self, results: tuple[Tensor, ...], join: Join) -> tuple[Tensor, ...]:
        """The results' rows that are left, after those that belong together were joined.

        Args:
            results: tensors with the call's rows; changed.
            join: (into, from): adds rows to rows in place.
        """
        for into, out_of in self.folds:
            held = tuple(take(x, into) for x in results)
            join(held, tuple(take(x, out_of) for x in results))
            if isinstance(into, Tensor):
                for x, some in zip(results, held, strict=True):
                    x.index_copy_(0, into, some)
        return tuple(take(x, self.source) for x in results)


@dataclass(frozen=True, eq=False)
class Placed:
    """A call on a device.

    Attributes:
        device: where it is.
        q, k: rows that are handed over.
        q_back, k_back: where results belong.
        fresh: rows to be cleared before results are merged; None: there are none, or all are.
        padding: rows whose results count for nothing.
        shift: fp32 [rows, 1], or None.
        compressed: the operator's compressed mask is given.
        visible: first and last-plus-one key that each row sees, [runs, 2, rows], where the mask is made of them; None:
            everything is visible, or compressed.
    """

    device: torch.device
    q: Index
    k: Index
    q_back: PlacedBack
    k_back: PlacedBack
    fresh: Index | None
    padding: Index | None
    shift: Tensor | None
    compressed: bool
    visible: Tensor | None

    def mask(self, keys: int) -> Tensor | None:
        """True is hidden; None: everything is visible. One that is made of rows is made at every call and goes with it:
        kept with a plan, those of all its steps would be as large as what the suite is there to avoid."""
        if self.compressed:
            return compressed_mask(self.device)
        if self.visible is None:
            return None
        column = torch.arange(keys, device=self.device)
        hidden = torch.ones(self.visible.shape[-1], keys, dtype=torch.bool, device=self.device)
        for first, last in self.visible[..., None]:
            hidden &= (column < first) | (column >= last)
        return hidden


def place(call: FusedCall, device: torch.device) -> Placed:
    """The call on a device, made at the first call."""
    if device not in call.placed:
        call.placed[device] = Placed(
            device,
            _rows(call.q, device),
            _rows(call.k, device),
            _back(call.q_back, device),
            _back(call.k_back, device),
            None if isinstance(call.fresh, bool) or not len(call.fresh) else _rows(call.fresh, device),
            None if call.padding is None else _rows(call.padding, device),
            None if call.shift is None else torch.from_numpy(call.shift.astype(np.float32)).to(device)[:, None],
            call.compressed,
            None if call.compressed or call.visible is None else torch.from_numpy(call.visible).to(device),
        )
    return call.placed[device]


def order_of(call: FusedCall, heads: int, device: torch.device) -> Order:
    """The order of the call's statistics, made at the first call."""
    key = device, heads
    if key not in call.placed:
        call.placed[key] = Order(call.cu_q, heads, device)
    return call.placed[key]


@lru_cache(maxsize=64)
def slopes_of(attention: AttentionConfig, heads: tuple[int, int], device: torch.device) -> Tensor | None:
    """ALiBi slopes of heads[0] .. heads[1] - 1, fp32; None without ALiBi."""
    if attention.slopes is None:
        return None
    return torch.from_numpy(attention.slopes[slice(*heads)].astype(np.float32)).to(device)


@lru_cache(maxsize=16)
def compressed_mask(device: torch.device) -> Tensor:
    """What the operator wants as mask in sparse modes 2 to 4: 2048 x 2048, True above the diagonal."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


_ones: dict[torch.device, Tensor] = {}


def ones(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """fp32 ones, which nobody writes to: a part of one tensor, as large as the largest that was asked for."""
    size = prod(shape)
    if device not in _ones or len(_ones[device]) < size:
        _ones[device] = torch.ones(size, device=device)
    return _ones[device][:size].view(shape)


def take(x: Tensor, rows: Index) -> Tensor:
    """A view for a run, else a copy."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _rows(rows: Rows, device: torch.device) -> Index:
    return rows if isinstance(rows, slice) else torch.from_numpy(np.ascontiguousarray(rows)).to(device)


def _back(back: Back, device: torch.device) -> PlacedBack:
    folds = tuple((_rows(into, device), _rows(out_of, device)) for into, out_of in back.folds)
    return PlacedBack(folds, _rows(back.source, device), _rows(back.target, device))
