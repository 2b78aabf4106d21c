"""Dense attention in fp64: the reference of the tests and of `mindspeed-cp doctor`. Quadratic memory; for small
inputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.layout import Documents, ragged_arange
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
    sink: Tensor | None = None,
    blocks: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition, with rows in any order. Differentiable.

    A query sees the keys of its own document, with a causal mask those at positions not greater than its own, with a
    window those within the window. A query without a visible key gets out 0, lse -inf, and gradients of 0.

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
        keep: bool [heads, tq, tk], True where an attention weight is kept; None: all.
        dropout_p: if keep is given, kept weights are divided by 1 - dropout_p.
        sink: [heads]: one more score for each row, whose key has the value 0.
        blocks: block of each query and of each key, [tq] and [tk], -1: none; queries see all keys of their block.

    Returns:
        out fp64 [tq, heads, head_dim_v] and lse fp64 [tq, heads], without dropout and with the sink.
    """
    heads_per_kv = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(heads_per_kv, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = position_k[None, :] - position_q[:, None]
    visible = document_q[:, None] == document_k[None, :]
    if mask == "causal":
        visible = visible & (distance <= 0)
    left, right = (-1, -1) if window is None else window
    if left != -1:
        visible = visible & (distance >= -left)
    if right != -1:
        visible = visible & (distance <= right)
    if blocks is not None:
        visible = visible | ((blocks[0][:, None] == blocks[1][None, :]) & (blocks[0][:, None] >= 0))
    if slopes is not None:
        slope = torch.tensor(np.asarray(slopes, np.float64), device=q.device)
        scores = scores - slope[:, None, None] * distance.abs().double()
    lse = scores.masked_fill(~visible, float("-inf")).logsumexp(-1)
    no_key = ~visible.any(1)
    if sink is not None:
        lse, no_key = torch.logaddexp(lse, sink.double()[:, None]), torch.zeros_like(no_key)
    weights = (scores - lse.masked_fill(no_key, 0.0)[..., None]).masked_fill(~visible, float("-inf")).exp()
    if keep is not None:
        weights = weights * keep / (1.0 - dropout_p)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def dense_packed_attention(
    attention: AttentionConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    *,
    kv_documents: Documents | None = None,
    dropout_key: tuple[int, int] | None = None,
    keep: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`dense_attention` of a whole packed batch in token order, one document at a time, in trees with the
    keys of its whole path.

    Args:
        attention: configuration of the layer.
        documents: lengths of the queries, and of the keys unless kv_documents is given. Positions start at 0 on both
            sides, in trees at the root.
        kv_documents: lengths of the keys, as many documents.
        dropout_key: (seed, layer) of :func:`mindspeed_cp.ops.dropout.keep_mask`; None: no dropout.
        keep: in its place, bool [heads, query tokens, key tokens], True where an attention weight is kept.
        sink: [heads], as for :func:`dense_attention`.
    """
    results = []
    keys = documents if kv_documents is None else kv_documents
    q_borders = documents.offsets.tolist() if len(documents) else [0, 0]
    heads = torch.arange(q.shape[1], device=q.device) + attention.first_head
    for document, (a, b) in enumerate(pairwise(q_borders)):
        seen = torch.from_numpy(_path_tokens(keys, document)).to(q.device)
        first = int(documents.first_positions[document]) if len(documents) else 0
        position_q, position_k = first + torch.arange(b - a, device=q.device), torch.arange(len(seen), device=q.device)
        kept = None if keep is None else keep[:, a:b][:, :, seen]
        if dropout_key is not None:
            kept = keep_mask(*dropout_key, heads, document, position_q, position_k, attention.dropout)
        blocks = None
        if documents.blocks is not None:
            of_keys = torch.from_numpy(documents.blocks.of(seen.cpu().numpy())).to(q.device)
            blocks = of_keys[len(seen) - (b - a) :], of_keys
        result = dense_attention(
            q[a:b], k[seen], v[seen],
            torch.zeros_like(position_q), torch.zeros_like(position_k), position_q, position_k,
            mask=attention.mask, scale=attention.scale, window=attention.window, slopes=attention.slopes,
            keep=kept, dropout_p=attention.dropout, sink=sink, blocks=blocks,
        )  # fmt: skip
        results.append(result)
    outs, statistics = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(statistics)


def _path_tokens(documents: Documents, document: int) -> np.ndarray:
    """Return the tokens of a document, in a tree after those of its ancestors, int64 [tokens]."""
    if not len(documents):
        return np.zeros(0, np.int64)
    path = np.array([document]) if documents.trees is None else documents.trees.path(document)
    return ragged_arange(documents.offsets[path], documents.lengths[path])
