"""The cpu backend: torch's flash kernels, one call for each tile or block of a tile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, merge_
from mindspeed_cp.ops.attention.contract import (
    BackwardState,
    ForwardState,
    Heads,
    check_dtype,
    pad_head_dim,
    uniform_head_groups,
)
from mindspeed_cp.ops.attention.cpu.kernels import CpuKernels
from mindspeed_cp.ops.attention.cpu.lowering import KernelCall, KernelCalls, lower_to_kernel_calls
from mindspeed_cp.plan import AttentionConfig


class CpuAttention:
    """Attention on the CPU: every AttentionConfig, for fp32, bf16 and fp16, computed in fp32: most CPUs have no
    instructions for the others, and results of several calls are rounded once.

    No tensor of queries x keys is allocated, except with dropout for one block
    (:data:`~mindspeed_cp.ops.attention.cpu.lowering.DROPOUT_BLOCK`). The same call gives the same bits every time.
    """

    name = "cpu"
    key = "cpu"
    deterministic = True

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """See the contract."""
        check_dtype("the cpu backend", dtype, (torch.float32, torch.bfloat16, torch.float16))

    def check_device(self, device: torch.device) -> None:
        """See the contract; no effect."""

    def lower(
        self, direction: str, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> KernelCalls:
        """See the contract."""
        return lower_to_kernel_calls(tiles, attention)

    def prepare(
        self, calls: Sequence[KernelCall], attention: AttentionConfig, heads: Heads, device: torch.device
    ) -> None:
        """See the contract; no effect."""

    def forward(
        self, calls: Sequence[KernelCall], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See the contract."""
        width = v.shape[-1]
        wide_q, wide_k, wide_v = (state.q, k, v) if width == k.shape[-1] else _same_width(state.q, k, v)
        for group in uniform_head_groups(attention, state.heads):
            kernels = CpuKernels(attention, group.q_range, state.dropout)
            q = wide_q[:, group.q]
            group_k, group_v = wide_k[:, group.kv], wide_v[:, group.kv]
            for call in calls:
                part_out, part_lse = kernels.forward(call, q[call.q], group_k[call.k], group_v[call.k])
                part_out = part_out[..., :width]
                if call.stores:
                    state.output.store(call.q, group.q, part_out, part_lse)
                    continue
                out, lse = (x[:, group.q] for x in state.output.fp32())
                for rows in call.unwritten:
                    out[rows] = 0
                merge_(out[call.q], lse[call.q], part_out, part_lse)

    def backward(
        self,
        calls: Sequence[KernelCall],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: GradientAccumulator,
        dv: GradientAccumulator,
    ) -> None:
        """See the contract."""
        width, width_v = k.shape[-1], v.shape[-1]
        wide_q, wide_k, wide_v, wide_out, wide_dout = state.q, k, v, state.out, state.dout
        if width != width_v:
            wide_q, wide_k, wide_v, wide_out, wide_dout = _same_width(state.q, k, v, state.out, state.dout)
        for group in uniform_head_groups(attention, state.heads):
            kernels = CpuKernels(attention, group.q_range, state.dropout)
            dout, q, out, lse = (x[:, group.q] for x in (wide_dout, wide_q, wide_out, state.lse))
            group_k, group_v = wide_k[:, group.kv], wide_v[:, group.kv]
            for call in calls:
                dq_part, dk_part, dv_part = kernels.backward(
                    call, dout[call.q], q[call.q], group_k[call.k], group_v[call.k], out[call.q], lse[call.q]
                )
                state.dq.add(call.q, dq_part[..., :width], group.q)
                dk.add(call.k, dk_part[..., :width], group.kv)
                dv.add(call.k, dv_part[..., :width_v], group.kv)


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad tensors to one head dimension, which the kernel requires."""
    width = max(x.shape[-1] for x in tensors)
    return [pad_head_dim(x, width) for x in tensors]
