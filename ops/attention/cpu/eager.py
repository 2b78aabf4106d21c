"""Eager attention of one block in fp32, with dropout, which the flash kernels do not support.

q, out and dout are [1, heads, rows, dim], k and v [1, kv heads, keys, dim]; query head h uses kv head
h // (heads / kv heads). Query heads that share a kv head are stacked along rows, so that matrix products sum their
gradients.
"""

from __future__ import annotations

from torch import Tensor


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
    out = _by_kv_head(p, k) @ v[0].float()
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
    d = _by_kv_head(dout[0].float(), k)
    dv = _by_kv_head(p * weights, k).transpose(-1, -2) @ d
    delta = (dout[0].float() * out[0].float()).sum(-1, keepdim=True)
    ds = (d @ v[0].float().transpose(-1, -2)).view_as(p).mul_(weights).sub_(delta).mul_(p).mul_(scale)
    ds = _by_kv_head(ds, k)
    dq = (ds @ k[0].float()).view(1, heads, rows, width)
    dk = ds.transpose(-1, -2) @ _by_kv_head(q[0].float(), k)
    return dq, dk.unsqueeze(0), dv.unsqueeze(0)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return scaled and masked scores, fp32 [heads, rows, keys]."""
    scores = (_by_kv_head(q[0].float(), k) @ k[0].float().transpose(-1, -2)).mul_(scale)
    scores = scores.view(q.shape[1], q.shape[2], k.shape[2])
    return scores if mask is None else scores.add_(mask[0])


def _by_kv_head(x: Tensor, k: Tensor) -> Tensor:
    """[heads, rows, n] -> [kv heads, query heads of each * rows, n]."""
    return x.reshape(k.shape[1], -1, x.shape[-1])
