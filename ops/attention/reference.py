"""Dense attention in fp64: the yardstick of every test, and of `mindspeed-cp doctor`.  Quadratic memory; small inputs
only."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mindspeed_cp.layout import Documents


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_q: Tensor,
    document_k: Tensor,
    position_q: Tensor,
    position_k: Tensor,
    *,
    mask: str = "causal",
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, rows in any order. Differentiable.

    A query sees the keys of its own document, under a causal mask those whose position is not greater than its own. A
    query that sees no key gets out 0 and lse -inf, and gradients of 0.

    Args:
        q: [tq, heads, head_dim].
        k: [tk, kv heads, head_dim].
        v: [tk, kv heads, head_dim_v].
        document_q, document_k: document of each row, [tq] and [tk].
        position_q, position_k: position of each row in its document.
        mask: "causal" or "full".
        scale: factor of q.k; default head_dim ** -0.5.

    Returns:
        out fp64 [tq, heads, head_dim_v] and lse fp64 [tq, heads].
    """
    shared = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    sees = document_q[:, None] == document_k[None, :]
    if mask == "causal":
        sees = sees & (position_k[None, :] <= position_q[:, None])
    lse = scores.masked_fill(~sees, float("-inf")).logsumexp(-1)
    blind = ~sees.any(1)
    weights = (scores - lse.masked_fill(blind, 0.0)[..., None]).masked_fill(~sees, float("-inf")).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def dense_packed_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, mask: str = "causal", scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`dense_attention` of a whole packed batch in token order, one document at a time."""
    outs, statistics = [], []
    borders = documents.offsets.tolist() if len(documents) else [0, 0]
    for a, b in pairwise(borders):
        document, position = torch.zeros(b - a, dtype=torch.int64), torch.arange(b - a)
        out, lse = dense_attention(
            q[a:b], k[a:b], v[a:b], document, document, position, position, mask=mask, scale=scale
        )
        outs.append(out)
        statistics.append(lse)
    return torch.cat(outs), torch.cat(statistics)
