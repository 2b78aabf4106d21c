"""Attention by this project's Triton kernel for tiles: every mask, ALiBi, grouped queries; no dropout."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.tile_attention import (
    TILE_DTYPES,
    TILE_MAX_HEAD_DIM,
    TileSchedule,
    schedule_block_rows,
    tile_attention_,
    tile_attention_backward_,
)
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator
from mindspeed_cp.ops.attention.contract import (
    BackwardState,
    ForwardState,
    Heads,
    check_dtype,
    contiguous_heads,
    uniform_head_groups,
    write_heads,
)
from mindspeed_cp.ops.attention.lowering.device_call import slopes_of
from mindspeed_cp.plan import AttentionConfig


@dataclass(eq=False)
class StepTiles:
    """The tiles of one (step, slot).

    Attributes:
        tiles: records of dtype TILE.
        attention: its window applies to the tiles.
        rows: rows of a block, by side: "q" (queries) and "k" (keys).
        schedules: by device and side, built at the first use.
    """

    tiles: np.ndarray
    attention: AttentionConfig
    rows: dict[str, int]
    schedules: dict[tuple[torch.device, str], TileSchedule] = field(default_factory=dict)

    def schedule(self, device: torch.device, side: str) -> TileSchedule:
        """Return the schedule by blocks of queries ("q") or of keys ("k")."""
        if (device, side) not in self.schedules:
            self.schedules[device, side] = TileSchedule.of(self.tiles, self.attention, self.rows[side], side, device)
        return self.schedules[device, side]


class CudaTileAttention:
    """Attention by `mindspeed_cp.ascend_kernels.tile_attention`. The same call gives the same bits every time.

    Args:
        name: device type of its tensors.
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
        """See the contract: no dropout."""
        if attention.dropout:
            raise ConfigError(
                f"attention.dropout is {attention.dropout}; the tile kernel has no dropout; valid: 0, or "
                "backend cpu or npu"
            )
        width = max(attention.head_dim, attention.head_dim_v)
        if width > TILE_MAX_HEAD_DIM:
            raise ConfigError(f"head_dim is {width}; valid for the tile kernel: up to {TILE_MAX_HEAD_DIM}")
        check_dtype("the tile kernel", dtype, TILE_DTYPES)

    def check_device(self, device: torch.device) -> None:
        """See the contract. A missing package triton raises at the first launch."""

    def lower(
        self, direction: str, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> dict[tuple[int, int], list[StepTiles]]:
        """See the contract."""
        backward = direction == "backward"
        bm, bn = schedule_block_rows(dtype, backward, max(attention.head_dim, attention.head_dim_v), self.name)
        block_rows = {"q": bm, "k": bn} if backward else {"q": bm}
        step_slots, index = np.unique(tiles[["step", "slot"]], return_inverse=True)
        return {
            (int(step), int(slot)): [StepTiles(tiles[index == i], attention, block_rows)]
            for i, (step, slot) in enumerate(step_slots)
        }

    def prepare(
        self, calls: Sequence[StepTiles], attention: AttentionConfig, heads: Heads, device: torch.device
    ) -> None:
        """See the contract."""
        for call in calls:
            for side in call.rows:
                call.schedule(device, side)

    def forward(
        self, calls: Sequence[StepTiles], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See the contract."""
        totals = state.output.fp32()
        for group in uniform_head_groups(attention, state.heads):
            q, out, lse = (contiguous_heads(x, group.q) for x in (state.q, *totals))
            group_k, group_v = contiguous_heads(k, group.kv), contiguous_heads(v, group.kv)
            slopes = slopes_of(attention, group.q_range, q.device)
            for call in calls:
                schedule = call.schedule(q.device, "q")
                tile_attention_(
                    q, group_k, group_v, out, lse, schedule, attention.softmax_scale, slopes, self.implementation
                )
            for total, part in zip(totals, (out, lse), strict=True):
                write_heads(total, group.q, part)

    def backward(
        self,
        calls: Sequence[StepTiles],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: GradientAccumulator,
        dv: GradientAccumulator,
    ) -> None:
        """See the contract."""
        all_dq, all_dk, all_dv = (total.fp32() for total in (state.dq, dk, dv))
        for group in uniform_head_groups(attention, state.heads):
            q, out, lse, dout, dq = (
                contiguous_heads(x, group.q) for x in (state.q, state.out, state.lse, state.dout, all_dq)
            )
            group_k, group_v, group_dk, group_dv = (contiguous_heads(x, group.kv) for x in (k, v, all_dk, all_dv))
            slopes = slopes_of(attention, group.q_range, q.device)
            for call in calls:
                schedules = call.schedule(q.device, "q"), call.schedule(q.device, "k")
                tile_attention_backward_(
                    q, group_k, group_v, out, lse, dout, dq, group_dk, group_dv, *schedules, attention.softmax_scale,
                    slopes, self.implementation,
                )  # fmt: skip
            write_heads(all_dq, group.q, dq)
            write_heads(all_dk, group.kv, group_dk)
            write_heads(all_dv, group.kv, group_dv)
