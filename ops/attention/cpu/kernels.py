"""One call on the CPU: torch's flash kernels, or with dropout, which these do not support, eager attention in fp32.

The functions of eager attention take fp32: q, out and dout are [1, heads, rows, dim], k and v [1, kv heads, keys, dim];
query head h uses kv head h // (heads / kv heads). Query heads that share a kv head are stacked along rows, so that
matrix products sum their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ops.attention.contract import DropoutKey
from mindspeed_cp.ops.attention.cpu.lowering import KernelCall, MaskKind
from mindspeed_cp.ops.dropout import keep_mask
from mindspeed_cp.plan import AttentionConfig

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


#: Before torch 2.9 the kernels take as many kv heads as query heads, and read and write past the end of fewer.
_TAKES_GROUPS = torch.__version__ >= "2.9"


@dataclass(frozen=True)
class CpuKernels:
    """The kernels for a range of heads.

    Tensors have the rows of one call, [rows, heads, dim], and one head dimension. Calls of kind DISTANCE are computed
    with queries in reverse order; arguments and results are in the original order.

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
        flips, causal = call.kind is MaskKind.DISTANCE, call.kind is MaskKind.CAUSAL
        scale = self.attention.softmax_scale
        q, k, v = _heads_first(q.float(), flips), _heads_first(k.float()), _heads_first(v.float())
        mask = self._mask(call)
        if self.dropout is None:
            k, v = (_for_each_query_head(x, q.shape[1]) for x in (k, v))
            out, lse = _FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        else:
            out, lse = eager_attention(q, k, v, mask, self._dropout_factors(call), scale)
        return _rows_first(out, flips), _rows_first(lse, flips)

    def backward(
        self, call: KernelCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of a call, from the complete out and lse."""
        flips, causal = call.kind is MaskKind.DISTANCE, call.kind is MaskKind.CAUSAL
        scale = self.attention.softmax_scale
        dout, q, out, lse = (_heads_first(x.float(), flips) for x in (dout, q, out, lse))
        k, v = _heads_first(k.float()), _heads_first(v.float())
        mask = self._mask(call)
        if self.dropout is None:
            kv_heads = k.shape[1]
            k, v = (_for_each_query_head(x, q.shape[1]) for x in (k, v))
            dq, dk, dv = _FLASH_BACKWARD(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
            dk, dv = (_summed_over_groups(x, kv_heads) for x in (dk, dv))
        else:
            dq, dk, dv = eager_attention_backward(dout, q, k, v, out, lse, mask, self._dropout_factors(call), scale)
        return _rows_first(dq, flips), _rows_first(dk), _rows_first(dv)

    def _mask(self, call: KernelCall) -> Tensor | None:
        """Return the additive mask of a call, for queries in reverse order."""
        if call.kind is not MaskKind.DISTANCE:
            return None
        reach = call.q_pos + call.rows - 1 - call.k_pos
        return distance_mask(self.attention, self.heads, reach, call.rows, call.keys)

    def _dropout_factors(self, call: KernelCall) -> Tensor:
        """Return the dropout factors of a call: 0, or 1 / (1 - p); fp32 [heads, rows, keys]."""
        assert self.dropout is not None
        p, first = self.attention.dropout, self.attention.first_head
        heads = _arange(first + self.heads[0], first + self.heads[1])
        queries, keys = (_arange(a, a + n) for a, n in ((call.q_pos, call.rows), (call.k_pos, call.keys)))
        queries = queries.flip(0) if call.kind is MaskKind.DISTANCE else queries
        return keep_mask(*self.dropout, heads, call.document, queries, keys, p).float().div_(1 - p)


def _arange(first: int, stop: int) -> Tensor:
    """Return first .. stop - 1 as int64 on the CPU, independently of torch's default device."""
    return torch.arange(first, stop, dtype=torch.int64, device="cpu")


def _for_each_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [1, kv_heads, keys, dim] for every query head where the kernel needs that."""
    return x if _TAKES_GROUPS or x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _summed_over_groups(x: Tensor, kv_heads: int) -> Tensor:
    """Sum gradients [1, heads or kv_heads, keys, dim] over the query heads of each kv head."""
    if x.shape[1] == kv_heads:
        return x
    return x.unflatten(1, (kv_heads, -1)).sum(2)


def _heads_first(x: Tensor, flip: bool = False) -> Tensor:
    """[rows, heads, ...] -> [1, heads, rows, ...], a view unless flipped."""
    return (x.flip(0) if flip else x).transpose(0, 1).unsqueeze(0)


def _rows_first(x: Tensor, flip: bool = False) -> Tensor:
    """[1, heads, rows, ...] -> [rows, heads, ...], a view unless flipped."""
    x = x[0].transpose(0, 1)
    return x.flip(0) if flip else x


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of a block.

    Args:
        q, k, v: see above; the head dimension of v may differ.
        mask: additive, fp32, broadcast to [1, heads, rows, keys]; every row has a visible key.
        weights: fp32 [heads, rows, keys], dropout factors of the softmax: 0, or 1 / (1 - p).
        scale: factor of q.k.

    Returns:
        out fp32, and lse without dropout, fp32 [1, heads, rows].
    """
    heads, rows, _ = q.shape[1:]
    scores = _scores(q, k, mask, scale)
    lse = scores.logsumexp(-1)
    p = scores.sub_(lse.unsqueeze(-1)).exp_().mul_(weights)
    out = _by_kv_head(p, k) @ v[0]
    return out.view(1, heads, rows, -1), lse.unsqueeze(0)


def eager_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    weights: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`eager_attention` from out and lse over all keys.

    With P the softmax and W the weights (Dao 2023, algorithm 2, with dropout): dV = (P W)^T dout and
    dS = P (W (dout V^T) - delta), where delta_i = dout_i.out_i = sum_j P_ij W_ij dout_i.v_j.

    Returns:
        dq, dk and dv in fp32, of the shapes of q, k and v.
    """
    heads, rows, width = q.shape[1:]
    p = _scores(q, k, mask, scale).sub_(lse[0].unsqueeze(-1)).exp_()
    d = _by_kv_head(dout[0], k)
    dv = _by_kv_head(p * weights, k).transpose(-1, -2) @ d
    delta = (dout[0] * out[0]).sum(-1, keepdim=True)
    ds = (d @ v[0].transpose(-1, -2)).view_as(p).mul_(weights).sub_(delta).mul_(p).mul_(scale)
    ds = _by_kv_head(ds, k)
    dq = (ds @ k[0]).view(1, heads, rows, width)
    dk = ds.transpose(-1, -2) @ _by_kv_head(q[0], k)
    return dq, dk.unsqueeze(0), dv.unsqueeze(0)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return scaled and masked scores, fp32 [heads, rows, keys]."""
    scores = (_by_kv_head(q[0], k) @ k[0].transpose(-1, -2)).mul_(scale)
    scores = scores.view(q.shape[1], q.shape[2], k.shape[2])
    return scores if mask is None else scores.add_(mask[0])


def _by_kv_head(x: Tensor, k: Tensor) -> Tensor:
    """[heads, rows, n] -> [kv heads, query heads of each * rows, n]."""
    return x.reshape(k.shape[1], -1, x.shape[-1])


# Masks and biases by position, without a tensor of queries x keys.
#
# Visibility and ALiBi bias of a (query, key) pair depend on their distance only. The mask of a tile is therefore a view
# of one table of distances: with the queries in descending order,
#
#     mask[i, j] = table[i + j]                         table   9  8  7  6  5  4 ...   distance: query - key
#
#     last query       9  8  7  6
#     the one before   8  7  6  5        stride 1 in both directions
#     ...              7  6  5  4
#
# The table has n + m - 1 numbers for n queries and m keys, is exact (every bias is rounded once, at any distance), and
# stays in the cache while a kernel reads it.


#: Maximum distance of cached tables; a tile with larger distances gets a table of its own.
CACHED_REACH = 1 << 13


def distance_mask(attention: AttentionConfig, heads: tuple[int, int], reach: int, queries: int, keys: int) -> Tensor:
    """Return the additive mask of a tile whose queries are in DESCENDING order of position.

    Args:
        attention: mask, window and slopes.
        heads: first and last-plus-one query head, for the slopes.
        reach: position of the last query minus position of the first key.
        queries: rows of the tile.
        keys: columns of the tile.

    Returns:
        fp32 [1, heads, queries, keys], or [1, 1, queries, keys] without ALiBi: -inf where the key is not
        visible, else -slope * |query position - key position|. A view: do not modify or keep it.
    """
    last = reach - (queries + keys - 2)
    if max(reach, -last) <= CACHED_REACH:
        table, first = _cached_table(attention, heads), CACHED_REACH - reach
    else:
        table, first = _table(attention, heads, reach, last), 0
    tables, length = table.shape
    return torch.from_numpy(table).as_strided((1, tables, queries, keys), (0, length, 1, 1), first)


@lru_cache(maxsize=16)
def _cached_table(attention: AttentionConfig, heads: tuple[int, int]) -> np.ndarray:
    """Return the cached table, as an array: a tensor would depend on the default type, default device or dispatch mode
    of its first user."""
    return _table(attention, heads, CACHED_REACH, -CACHED_REACH)


def _table(attention: AttentionConfig, heads: tuple[int, int], first: int, last: int) -> np.ndarray:
    """Return fp32 [heads or 1, distances] for the distances first, first - 1 .. last."""
    distance = np.arange(first, last - 1, -1, dtype=np.int64)
    if attention.slopes is None:
        table = np.zeros((1, len(distance)), np.float32)
    else:
        table = (attention.slopes[slice(*heads), None] * -np.abs(distance)).astype(np.float32)
    left, right = attention.visible_range
    table[:, (distance > left) | (distance < -right)] = -np.inf
    return table
