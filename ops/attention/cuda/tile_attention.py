"""A backend on this project's own kernel for tiles: every mask, ALiBi, grouped queries; no dropout."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.tile_attention import (
    WIDEST,
    TileSchedule,
    blocks_for,
    tile_attention_,
    tile_attention_backward_,
)
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import BackwardState, ForwardState, Heads
from mindspeed_cp.ops.attention.heads import even_parts, put_back, whole
from mindspeed_cp.plan import AttentionConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class TileCall:
    """The tiles of one (step, slot), and the schedules on each device that has asked for them, by side."""

    tiles: np.ndarray
    attention: AttentionConfig
    rows: dict[str, int]
    placed: dict[tuple[torch.device, str], TileSchedule] = field(default_factory=dict)

    def on(self, device: torch.device, side: str) -> TileSchedule:
        """The schedule by blocks of queries ("q") or of keys ("k")."""
        if (device, side) not in self.placed:
            self.placed[device, side] = TileSchedule.of(self.tiles, self.attention, self.rows[side], side, device)
        return self.placed[device, side]


class TileAttention:
    """Attention by `mindspeed_cp.ascend_kernels.tile_attention`, where Triton runs, or in torch (`implementation`).

    Args:
        name: kind of device whose tensors it takes.
        implementation: "triton", "torch", or None: by the device.
    """

    deterministic = True

    def __init__(self, name: str = "cuda", implementation: str | None = None) -> None:
        self.name = name
        self.implementation = implementation

    @property
    def key(self) -> Hashable:
        """See the contract."""
        return "tiles", self.name, self.implementation

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """Raise ConfigError for dropout, and for another type than fp32, bf16 and fp16."""
        if attention.dropout:
            raise ConfigError(
                f"attention.dropout is {attention.dropout}; the kernel of tiles drops nothing; valid: 0, or "
                "backend cpu or npu"
            )
        width = max(attention.head_dim, attention.head_dim_v)
        if width > WIDEST:
            raise ConfigError(f"head_dim is {width}; valid for the kernel of tiles: up to {WIDEST}")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype}; the kernel of tiles supports {', '.join(str(d)[6:] for d in DTYPES)}")

    def check_device(self, device: torch.device) -> None:
        """See the contract: a device without Triton raises where a kernel is launched, as Triton is asked for there."""

    def lower_forward(
        self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> dict[tuple[int, int], list[TileCall]]:
        """See the contract."""
        return self._lower(tiles, attention, dtype, backward=False)

    def lower_backward(
        self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> dict[tuple[int, int], list[TileCall]]:
        """See the contract."""
        return self._lower(tiles, attention, dtype, backward=True)

    def _lower(
        self, tiles: np.ndarray, attention: AttentionConfig, dtype: torch.dtype, backward: bool
    ) -> dict[tuple[int, int], list[TileCall]]:
        bm, bn = blocks_for(dtype, backward, max(attention.head_dim, attention.head_dim_v), self.name)
        rows = {"q": bm, "k": bn} if backward else {"q": bm}
        keys, of = np.unique(tiles[["step", "slot"]], return_inverse=True)
        return {
            (int(key["step"]), int(key["slot"])): [TileCall(tiles[of == i], attention, rows)]
            for i, key in enumerate(keys)
        }

    def place(self, calls: Sequence[TileCall], attention: AttentionConfig, heads: Heads, device: torch.device) -> None:
        """See the contract."""
        for call in calls:
            for side in call.rows:
                call.on(device, side)

    def forward(
        self, calls: Sequence[TileCall], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See the contract."""
        for part in even_parts(attention, state.heads):
            q, out, lse = (whole(x, part.q) for x in (state.q, state.out, state.lse))
            kk, vv = whole(k, part.kv), whole(v, part.kv)
            slopes = _slopes(attention, part.numbers, q.device)
            for call in calls:
                schedule = call.on(q.device, "q")
                tile_attention_(q, kk, vv, out, lse, schedule, attention.softmax_scale, slopes, self.implementation)
            put_back(state.out, part.q, out)
            put_back(state.lse, part.q, lse)

    def backward(
        self,
        calls: Sequence[TileCall],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """See the contract."""
        for part in even_parts(attention, state.heads):
            q, out, lse, dout, dq = (whole(x, part.q) for x in (state.q, state.out, state.lse, state.dout, state.dq))
            kk, vv, dkk, dvv = (whole(x, part.kv) for x in (k, v, dk, dv))
            slopes = _slopes(attention, part.numbers, q.device)
            for call in calls:
                schedules = call.on(q.device, "q"), call.on(q.device, "k")
                tile_attention_backward_(
                    q, kk, vv, out, lse, dout, dq, dkk, dvv, *schedules, attention.softmax_scale, slopes,
                    self.implementation,
                )  # fmt: skip
            put_back(state.dq, part.q, dq)
            put_back(dk, part.kv, dkk)
            put_back(dv, part.kv, dvv)


@lru_cache(maxsize=64)
def _slopes(attention: AttentionConfig, heads: tuple[int, int], device: torch.device) -> Tensor | None:
    if attention.slopes is None:
        return None
    return torch.from_numpy(attention.slopes[slice(*heads)].astype(np.float32)).to(device)
