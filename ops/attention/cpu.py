"""The cpu backend: torch's own flash kernels, one call per tile or block of a tile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import BackwardState, ForwardState, Heads
from mindspeed_cp.ops.attention.cpu_costs import Costs
from mindspeed_cp.ops.attention.cpu_kernels import Kernels
from mindspeed_cp.ops.attention.cpu_lowering import Call, Lowering, lower
from mindspeed_cp.ops.attention.heads import even_parts
from mindspeed_cp.ops.merge import merge_
from mindspeed_cp.plan import AttentionConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CpuAttention:
    """Attention on the CPU: every AttentionConfig, in fp32, bf16 and fp16.

    No tensor of queries x keys exists, but under dropout those of one block
    (:data:`~mindspeed_cp.ops.attention.cpu_lowering.DROPOUT_BLOCK`). The same call gives the same bits every time.
    """

    name = "cpu"
    key = "cpu"
    deterministic = True

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """Raise ConfigError for another type than fp32, bf16 and fp16."""
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype}; the cpu backend supports {', '.join(str(d)[6:] for d in DTYPES)}")

    def check_device(self, device: torch.device) -> None:
        """See the contract: nothing is needed."""

    def lower_forward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype) -> Lowering:
        """See the contract."""
        return lower(tiles, rows, attention, Costs.of("forward", attention, dtype))

    def lower_backward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype) -> Lowering:
        """See the contract."""
        return lower(tiles, rows, attention, Costs.of("backward", attention, dtype))

    def place(self, calls: Sequence[Call], attention: AttentionConfig, heads: Heads, device: torch.device) -> None:
        """See the contract: nothing is needed."""

    def forward(
        self, calls: Sequence[Call], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See the contract."""
        width = v.shape[-1]
        wide_q, wide_k, wide_v = _same_width(state.q, k, v)
        for part in even_parts(attention, state.heads):
            kernels = Kernels(attention, part.numbers, state.dropout)
            q, out, lse = (x[:, part.q] for x in (wide_q, state.out, state.lse))
            kk, vv = wide_k[:, part.kv], wide_v[:, part.kv]
            for call in calls:
                some, some_lse = kernels.forward(call, q[call.q], kk[call.k], vv[call.k])
                some = some[..., :width]
                if call.first:
                    out[call.q], lse[call.q] = some, some_lse
                    continue
                for rows in call.fresh:
                    out[rows] = 0
                merge_(out[call.q], lse[call.q], some, some_lse)

    def backward(
        self,
        calls: Sequence[Call],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """See the contract."""
        width, width_v = k.shape[-1], v.shape[-1]
        wide_q, wide_k, wide_v = _same_width(state.q, k, v)
        wide_out, wide_dout = (_widen(x, wide_v.shape[-1]) for x in (state.out, state.dout))
        for part in even_parts(attention, state.heads):
            kernels = Kernels(attention, part.numbers, state.dropout)
            dout, q, out, lse, dq = (x[:, part.q] for x in (wide_dout, wide_q, wide_out, state.lse, state.dq))
            kk, vv, part_dk, part_dv = (x[:, part.kv] for x in (wide_k, wide_v, dk, dv))
            for call in calls:
                some_dq, some_dk, some_dv = kernels.backward(
                    call, dout[call.q], q[call.q], kk[call.k], vv[call.k], out[call.q], lse[call.q]
                )
                dq[call.q] += some_dq[..., :width]
                part_dk[call.k] += some_dk[..., :width]
                part_dv[call.k] += some_dv[..., :width_v]


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel wants one head_dim for q, k and v: the narrower side gets zeros, which change neither scores nor
    outputs."""
    width = max(q.shape[-1], v.shape[-1])
    return _widen(q, width), _widen(k, width), _widen(v, width)


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
