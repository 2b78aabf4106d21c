"""The cpu backend: torch's own flash kernels, one call per tile, and batched products for small backward tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import BackwardState, ForwardState
from mindspeed_cp.ops.attention.cpu_lowering import SMALL, Call, Group, Lowering, lower
from mindspeed_cp.ops.merge import merge_
from mindspeed_cp.plan import AttentionConfig

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CpuAttention:
    """Attention on the CPU. No tensor of queries x keys exists beyond one group of small tiles (:data:`SMALL`)."""

    name = "cpu"

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """Any AttentionConfig of this version is supported, in fp32, bf16 and fp16."""
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype}; the cpu backend supports {', '.join(str(d)[6:] for d in DTYPES)}")

    def lower_forward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig) -> Lowering:
        """One call per tile: batching small tiles gains nothing in this kernel's forward."""
        return lower(tiles, rows, small=0)

    def lower_backward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig) -> Lowering:
        """One call per tile, small ones in groups."""
        return lower(tiles, rows, small=SMALL)

    def forward(
        self, calls: Sequence[Call], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See the contract."""
        q, out, lse = state.q, state.out, state.lse
        width = v.shape[-1]
        q, k, v = _same_width(q, k, v)
        scale = attention.softmax_scale
        for call in calls:
            part, part_lse = _FLASH(
                _heads_first(q[call.q]), _heads_first(k[call.k]), _heads_first(v[call.k]), 0.0, call.causal, scale=scale
            )
            part, part_lse = part[0].transpose(0, 1)[..., :width], part_lse[0].transpose(0, 1)
            if call.first:
                out[call.q], lse[call.q] = part, part_lse
            else:
                merge_(out[call.q], lse[call.q], part, part_lse)

    def backward(
        self,
        calls: Sequence[Call | Group],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """See the contract."""
        width, width_v, scale = state.q.shape[-1], v.shape[-1], attention.softmax_scale
        groups = [call for call in calls if isinstance(call, Group)]
        if len(groups) < len(calls):
            q, wide_k, wide_v = _same_width(state.q, k, v)
            out, dout = (_widen(x, wide_v.shape[-1]) for x in (state.out, state.dout))
            for call in calls:
                if isinstance(call, Group):
                    continue
                rows = [_heads_first(x) for x in (dout[call.q], q[call.q], wide_k[call.k], wide_v[call.k], out[call.q])]
                lse = state.lse[call.q].transpose(0, 1).unsqueeze(0)
                grads = _FLASH_BACKWARD(*rows, lse, 0.0, call.causal, scale=scale)
                part_q, part_k, part_v = (g[0].transpose(0, 1) for g in grads)
                state.dq[call.q] += part_q[..., :width]
                dk[call.k] += part_k[..., :width]
                dv[call.k] += part_v[..., :width_v]
        if groups:
            delta = (state.dout.float() * state.out.float()).sum(-1)
            for group in groups:
                _group_backward(group, scale, state, delta, k, v, dk, dv)


def _group_backward(
    group: Group, scale: float, state: BackwardState, delta: Tensor, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """The flash backward written as matrix products (Dao 2023, algorithm 2), in fp32, for many small tiles at once.

    Query heads that share a kv head are laid one below the other, so that products sum their gradients.
    """
    tiles, n, m = group.shape
    kv_heads = k.shape[1]
    shared = state.q.shape[1] // kv_heads

    def queries(x: Tensor) -> Tensor:  # [t, heads, dim] -> [tiles, kv heads, shared * n, dim]
        x = x[group.q_rows].float().view(tiles, n, kv_heads, shared, x.shape[-1])
        return x.permute(0, 2, 3, 1, 4).reshape(tiles, kv_heads, shared * n, x.shape[-1])

    def keys(x: Tensor) -> Tensor:  # [rows, kv heads, dim] -> [tiles, kv heads, m, dim]
        return x[group.k_rows].float().view(tiles, m, kv_heads, x.shape[-1]).transpose(1, 2)

    q, dout, lse, d = (queries(x) for x in (state.q, state.dout, state.lse.unsqueeze(-1), delta.unsqueeze(-1)))
    kk, vv = keys(k), keys(v)
    p = (q @ kk.transpose(-1, -2)).mul_(scale).sub_(lse)
    p.view(tiles, kv_heads * shared, n, m).add_(group.hidden)
    p.exp_()
    ds = (dout @ vv.transpose(-1, -2)).sub_(d).mul_(p).mul_(scale)
    dq = (ds @ kk).view(tiles, kv_heads, shared, n, -1).permute(0, 3, 1, 2, 4)
    state.dq.index_add_(0, group.q_rows, dq.reshape(tiles * n, kv_heads * shared, -1))
    dk.index_add_(0, group.k_rows, (ds.transpose(-1, -2) @ q).transpose(1, 2).reshape(tiles * m, kv_heads, -1))
    dv.index_add_(0, group.k_rows, (p.transpose(-1, -2) @ dout).transpose(1, 2).reshape(tiles * m, kv_heads, -1))


def _heads_first(x: Tensor) -> Tensor:
    """[rows, heads, dim] -> [1, heads, rows, dim], a view."""
    return x.transpose(0, 1).unsqueeze(0)


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel wants one head_dim for q, k and v: the narrower side gets zeros, which change neither scores nor
    outputs."""
    if q.shape[-1] == v.shape[-1]:
        return q, k, v
    width = max(q.shape[-1], v.shape[-1])
    return _widen(q, width), _widen(k, width), _widen(v, width)


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
