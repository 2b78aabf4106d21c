"""One call on the CPU: torch's flash kernels, or eager attention with dropout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mindspeed_cp.ops.attention.contract import DropoutKey
from mindspeed_cp.ops.attention.cpu.distance_masks import distance_mask
from mindspeed_cp.ops.attention.cpu.eager import eager_attention, eager_attention_backward
from mindspeed_cp.ops.attention.cpu.lowering import KernelCall, MaskKind
from mindspeed_cp.ops.dropout import keep_mask
from mindspeed_cp.ops.torch_release import torch_release
from mindspeed_cp.plan import AttentionConfig

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


#: Before torch 2.9 the kernels take as many kv heads as query heads, and read and write past the end of fewer.
_TAKES_GROUPS = torch_release() >= (2, 9)


@dataclass(frozen=True)
class CpuKernels:
    """The kernels for a range of heads.

    Tensors have the rows of one call, [rows, heads, dim], and one head dimension. Calls of kind DISTANCE are computed
    with queries in reverse order, calls of kind REVERSED with keys in reverse order as well; arguments and results are
    in the original order.

    Attributes:
        attention: configuration of the layer.
        heads: first and last-plus-one query head.
        dropout: seed and layer, or None.
    """

    attention: AttentionConfig
    heads: tuple[int, int]
    dropout: DropoutKey | None

    def forward(self, call: KernelCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the partial out [rows, heads, dim] and fp32 lse [rows, heads] of a call."""
        kind = call.kind
        if call.upcast:
            q, k, v = (x.float() for x in (q, k, v))
        q, k, v = (_heads_first(x, flip) for x, flip in ((q, kind.flips_q), (k, kind.flips_k), (v, kind.flips_k)))
        mask, causal, scale = self._mask(call), kind.is_causal, self.attention.softmax_scale
        if self.dropout is None:
            k, v = (_for_each_query_head(x, q.shape[1]) for x in (k, v))
            out, lse = _FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        else:
            out, lse = eager_attention(q, k, v, mask, self._dropout_factors(call), scale)
        out, lse = _rows_first(out, kind.flips_q), _rows_first(lse, kind.flips_q)
        return out, lse - self._shift(call) if self._is_linear(call) else lse

    def backward(
        self, call: KernelCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of a call, from the complete out and lse."""
        kind = call.kind
        if self._is_linear(call):
            lse = lse + self._shift(call)
        if call.upcast:
            dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
        dout, q, out, lse = (_heads_first(x, kind.flips_q) for x in (dout, q, out, lse))
        k, v = (_heads_first(x, kind.flips_k) for x in (k, v))
        mask, causal, scale = self._mask(call), kind.is_causal, self.attention.softmax_scale
        if self.dropout is None:
            kv_heads = k.shape[1]
            k, v = (_for_each_query_head(x, q.shape[1]) for x in (k, v))
            dq, dk, dv = _FLASH_BACKWARD(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
            dk, dv = (_summed_over_groups(x, kv_heads) for x in (dk, dv))
        else:
            dq, dk, dv = eager_attention_backward(dout, q, k, v, out, lse, mask, self._dropout_factors(call), scale)
        return _rows_first(dq, kind.flips_q), _rows_first(dk, kind.flips_k), _rows_first(dv, kind.flips_k)

    def _mask(self, call: KernelCall) -> Tensor | None:
        """Return the additive mask of a call, in the order of rows and keys of the computation."""
        if call.kind == MaskKind.DISTANCE:
            reach = call.q_pos + call.rows - 1 - call.k_pos
            return distance_mask(self.attention, self.heads, reach, call.rows, call.keys)
        if not self._is_linear(call):
            return None
        away = _arange(0, call.keys) - call.keys // 2
        return (self._slopes * (away.flip(0) if call.kind == MaskKind.REVERSED else away))[None, :, None].float()

    def _is_linear(self, call: KernelCall) -> bool:
        """True if the bias of a call is computed as a function linear in the key.

        Where no key comes after a query, -slope * (query - key) = slope * (key - middle) - :meth:`_shift`. The first
        term, one number for each key and head, works with the kernel's causal mask; the shift goes into lse.
        """
        return call.kind.is_causal and self.attention.slopes is not None

    def _shift(self, call: KernelCall) -> Tensor:
        """Return slope * (query - middle key) of a call, fp32 [rows, heads]."""
        away = _arange(0, call.rows) + (call.q_pos - call.k_pos - call.keys // 2)
        return (away[:, None] * self._slopes[:, 0]).float()

    @cached_property
    def _slopes(self) -> Tensor:
        """fp64 [heads, 1]."""
        assert self.attention.slopes is not None
        return torch.from_numpy(self.attention.slopes[slice(*self.heads)].copy())[:, None]

    def _dropout_factors(self, call: KernelCall) -> Tensor:
        """Return the dropout factors of a call: 0, or 1 / (1 - p); fp32 [heads, rows, keys]."""
        assert self.dropout is not None
        p, first = self.attention.dropout, self.attention.first_head
        heads = _arange(first + self.heads[0], first + self.heads[1])
        queries, keys = (_arange(a, a + n) for a, n in ((call.q_pos, call.rows), (call.k_pos, call.keys)))
        queries = queries.flip(0) if call.kind.flips_q else queries
        return keep_mask(*self.dropout, heads, call.document, queries, keys, p).float().div_(1 - p)


def _arange(first: int, stop: int) -> Tensor:
    """Return first .. stop - 1 as int64 on the CPU, independently of torch's default device."""
    return torch.arange(first, stop, dtype=torch.int64, device="cpu")


def _for_each_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [1, kv_heads, keys, dim] for every query head where the kernel needs that."""
    return x if _TAKES_GROUPS or x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _summed_over_groups(x: Tensor, kv_heads: int) -> Tensor:
    """Sum gradients [1, heads or kv_heads, keys, dim] over the query heads of each kv head, in fp32."""
    if x.shape[1] == kv_heads:
        return x
    return x.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float32)


def _heads_first(x: Tensor, flip: bool) -> Tensor:
    """[rows, heads, ...] -> [1, heads, rows, ...], a view unless flipped."""
    return (x.flip(0) if flip else x).transpose(0, 1).unsqueeze(0)


def _rows_first(x: Tensor, flip: bool) -> Tensor:
    """[1, heads, rows, ...] -> [rows, heads, ...], a view unless flipped."""
    x = x[0].transpose(0, 1)
    return x.flip(0) if flip else x
