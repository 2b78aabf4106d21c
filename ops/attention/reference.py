"""Dense attention in fp64: the yardstick of every test, and of `mindspeed-cp doctor`.  Quadratic memory; small inputs
only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.dropout import keep_mask
from mindspeed_cp.plan import AttentionConfig


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
    window: tuple[int, int] | None = None,
    slopes: Sequence[float] | np.ndarray | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, rows in any order. Differentiable.

    A query sees the keys of its own document, under a causal mask those whose position is not greater than its own,
    under a window those not farther away than it says. A query that sees no key gets out 0 and lse -inf, and gradients
    of 0.

    Args:
        q: [tq, heads, head_dim].
        k: [tk, kv heads, head_dim].
        v: [tk, kv heads, head_dim_v].
        document_q, document_k: document of each row, [tq] and [tk].
        position_q, position_k: position of each row in its document.
        mask: "causal" or "full".
        scale: factor of q.k; default head_dim ** -0.5.
        window: (left, right), positions; -1 is no limit.
        slopes: ALiBi, one for each head: -slope * |query position - key position| is added to the scaled scores.
        keep: bool [heads, tq, tk]: attention weights that are not dropped; None: all.
        dropout_p: what is kept is divided by 1 - dropout_p, if keep is given.

    Returns:
        out fp64 [tq, heads, head_dim_v] and lse fp64 [tq, heads], that of all scores, dropped or not.
    """
    shared = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    away = position_k[None, :] - position_q[:, None]
    sees = document_q[:, None] == document_k[None, :]
    if mask == "causal":
        sees = sees & (away <= 0)
    left, right = (-1, -1) if window is None else window
    if left != -1:
        sees = sees & (away >= -left)
    if right != -1:
        sees = sees & (away <= right)
    if slopes is not None:
        slope = torch.tensor(np.asarray(slopes, np.float64), device=q.device)
        scores = scores - slope[:, None, None] * away.abs().double()
    lse = scores.masked_fill(~sees, float("-inf")).logsumexp(-1)
    blind = ~sees.any(1)
    weights = (scores - lse.masked_fill(blind, 0.0)[..., None]).masked_fill(~sees, float("-inf")).exp()
    if keep is not None:
        weights = weights * keep / (1.0 - dropout_p)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def dense_packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    *,
    mask: str = "causal",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    slopes: Sequence[float] | np.ndarray | None = None,
    dropout_p: float = 0.0,
    dropout_key: tuple[int, int] | None = None,
    first_head: int = 0,
    kv_documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`dense_attention` of a whole packed batch in token order, one document at a time.

    Args:
        documents: lengths of the queries, and of the keys unless kv_documents says otherwise. Positions start at 0 on
            both sides.
        dropout_key: (seed, layer) of :func:`mindspeed_cp.ops.dropout.keep_mask`; None: nothing is dropped.
        first_head: number of head 0 in the whole layer, for dropout.
        kv_documents: lengths of the keys, as many documents.
    """
    outs, statistics = [], []
    keys = documents if kv_documents is None else kv_documents
    borders, k_borders = (x.offsets.tolist() if len(x) else [0, 0] for x in (documents, keys))
    heads = torch.arange(q.shape[1], device=q.device) + first_head
    for number, ((a, b), (c, d)) in enumerate(zip(pairwise(borders), pairwise(k_borders), strict=True)):
        position_q, position_k = (torch.arange(n, device=q.device) for n in (b - a, d - c))
        keep = None
        if dropout_key is not None:
            keep = keep_mask(*dropout_key, heads, number, position_q, position_k, dropout_p)
        out, lse = dense_attention(
            q[a:b],
            k[c:d],
            v[c:d],
            torch.zeros_like(position_q),
            torch.zeros_like(position_k),
            position_q,
            position_k,
            mask=mask,
            scale=scale,
            window=window,
            slopes=slopes,
            keep=keep,
            dropout_p=dropout_p,
        )
        outs.append(out)
        statistics.append(lse)
    return torch.cat(outs), torch.cat(statistics)


def dense_attention_of(
    attention: AttentionConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    *,
    kv_documents: Documents | None = None,
    dropout_key: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`dense_packed_attention` with all that an AttentionConfig says."""
    return dense_packed_attention(
        q,
        k,
        v,
        documents,
        mask=attention.mask,
        scale=attention.scale,
        window=attention.window,
        slopes=attention.slopes,
        dropout_p=attention.dropout,
        dropout_key=dropout_key,
        first_head=attention.first_head,
        kv_documents=kv_documents,
    )
