"""One call on the CPU: torch's flash kernels, or explicit weights where some are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mindspeed_cp.ops.attention.contract import DropoutKey
from mindspeed_cp.ops.attention.cpu_lowering import Call, Kind
from mindspeed_cp.ops.attention.distances import distance_mask
from mindspeed_cp.ops.attention.explicit import explicit_attention, explicit_attention_backward
from mindspeed_cp.ops.dropout import keep_mask
from mindspeed_cp.plan import AttentionConfig

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class Kernels:
    """The kernels for some heads of an attention.

    Tensors are the rows of one call, [rows, heads, dim]; q, k and v have one width. Calls by distance are computed with
    their queries in reverse, reversed ones with their keys as well; nothing of that is seen from outside.

    Attributes:
        attention: what is computed.
        heads: first and last-plus-one query head in the attention.
        dropout: seed and layer, or None.
    """

    attention: AttentionConfig
    heads: tuple[int, int]
    dropout: DropoutKey | None

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Partial out [rows, heads, dim of v] and fp32 lse [rows, heads] of a call."""
        turn_q, turn_k = _turns(call)
        q, k, v = (_heads_first(x, turn) for x, turn in ((q, turn_q), (k, turn_k), (v, turn_k)))
        mask, causal, scale = self._mask(call), _is_causal(call), self.attention.softmax_scale
        if self.dropout is None:
            out, lse = _FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        else:
            out, lse = explicit_attention(q, k, v, mask, self._weights(call), scale)
        out, lse = _rows_first(out, turn_q), _rows_first(lse, turn_q)
        return out, lse - self._shift(call) if self._is_linear(call) else lse

    def backward(
        self, call: Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of a call, from the complete out and lse."""
        turn_q, turn_k = _turns(call)
        if self._is_linear(call):
            lse = lse + self._shift(call)
        if call.upcast:
            dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
        dout, q, out, lse = (_heads_first(x, turn_q) for x in (dout, q, out, lse))
        k, v = (_heads_first(x, turn_k) for x in (k, v))
        mask, causal, scale = self._mask(call), _is_causal(call), self.attention.softmax_scale
        if self.dropout is None:
            dq, dk, dv = _FLASH_BACKWARD(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        else:
            dq, dk, dv = explicit_attention_backward(dout, q, k, v, out, lse, mask, self._weights(call), scale)
        return _rows_first(dq, turn_q), _rows_first(dk, turn_k), _rows_first(dv, turn_k)

    def _mask(self, call: Call) -> Tensor | None:
        """Additive mask of a call, in the order of rows and keys in which it is computed."""
        if call.kind == Kind.DISTANCE:
            reach = call.q_pos + call.rows - 1 - call.k_pos
            return distance_mask(self.attention, self.heads, reach, call.rows, call.keys)
        if not self._is_linear(call):
            return None
        away = _count(0, call.keys) - call.keys // 2
        return (self._slopes * (away.flip(0) if call.kind == Kind.REVERSED else away))[None, :, None].float()

    def _is_linear(self, call: Call) -> bool:
        """Whether the bias of a call is made linear in the key.

        Where no key comes after a query, -slope * (query - key) is slope * (key - middle) less :meth:`_shift`. Such a
        bias, one number for each key and head, goes with the kernel's causal mask; the shift goes into lse.
        """
        return _is_causal(call) and self.attention.slopes is not None

    def _shift(self, call: Call) -> Tensor:
        """slope * (query - middle key) of a call, fp32 [rows, heads]."""
        away = _count(0, call.rows) + (call.q_pos - call.k_pos - call.keys // 2)
        return (away[:, None] * self._slopes[:, 0]).float()

    @cached_property
    def _slopes(self) -> Tensor:
        """fp64 [heads, 1]."""
        assert self.attention.slopes is not None
        return torch.from_numpy(self.attention.slopes[slice(*self.heads)].copy())[:, None]

    def _weights(self, call: Call) -> Tensor:
        """What the attention weights of a call are multiplied by: 0, or 1 / (1 - p); fp32 [heads, rows, keys]."""
        assert self.dropout is not None
        p, first = self.attention.dropout, self.attention.first_head
        heads = _count(first + self.heads[0], first + self.heads[1])
        queries, keys = (_count(a, a + n) for a, n in ((call.q_pos, call.rows), (call.k_pos, call.keys)))
        queries = queries.flip(0) if _turns(call)[0] else queries
        return keep_mask(*self.dropout, heads, call.document, queries, keys, p).float().div_(1 - p)


def _count(first: int, stop: int) -> Tensor:
    """first .. stop - 1 as int64 on the CPU, whatever torch's default device is."""
    return torch.arange(first, stop, dtype=torch.int64, device="cpu")


def _is_causal(call: Call) -> bool:
    return call.kind in (Kind.CAUSAL, Kind.REVERSED)


def _turns(call: Call) -> tuple[bool, bool]:
    """Whether queries and keys are computed in reverse."""
    return call.kind in (Kind.DISTANCE, Kind.REVERSED), call.kind == Kind.REVERSED


def _heads_first(x: Tensor, turn: bool) -> Tensor:
    """[rows, heads, ...] -> [1, heads, rows, ...], a view unless it is turned."""
    return (x.flip(0) if turn else x).transpose(0, 1).unsqueeze(0)


def _rows_first(x: Tensor, turn: bool) -> Tensor:
    """[1, heads, rows, ...] -> [rows, heads, ...], a view unless it is turned."""
    x = x[0].transpose(0, 1)
    return x.flip(0) if turn else x
