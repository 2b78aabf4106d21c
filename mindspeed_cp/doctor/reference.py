"""Inputs of a check, and their dense attention in fp64 on the host: what each device and type is compared with."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention import dense_attention
from mindspeed_cp.ops.dropout import keep_mask
from mindspeed_cp.plan import AttentionConfig

RESULT_NAMES = ("out", "lse", "dq", "dk", "dv")
DROPOUT_KEY = (1234, 5)  # any seed and layer

#: Query rows that are computed at once: so the matrices stay in the processor's cache, and keys behind the last row of
#: a block are left out. One causal document of 2,500 rows takes a quarter of the time of all its rows at once.
BLOCK_ROWS = 128


class ReferenceKey(NamedTuple):
    """What a reference depends on.

    Attributes:
        lengths, kv_lengths: rows of the documents, of queries and of keys.
        attention: configuration of the attention.
        seed: seed of the inputs.
    """

    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    attention: AttentionConfig
    seed: int


@lru_cache(maxsize=1)
def reference_inputs(key: ReferenceKey) -> tuple[Tensor, ...]:
    """Return q, k, v and dout, fp32 [rows, heads, width]: multiples of 1/16 below 8, which fp32, fp16 and bf16 hold, so
    that one reference serves all three."""
    attention = key.attention
    generator = torch.Generator().manual_seed(key.seed)
    rows, kv_rows = sum(key.lengths), sum(key.kv_lengths)
    shapes = (
        (rows, attention.heads, attention.head_dim),
        (kv_rows, attention.kv_heads, attention.head_dim),
        (kv_rows, attention.kv_heads, attention.head_dim_v),
        (rows, attention.heads, attention.head_dim_v),
    )
    return tuple((torch.randn(x, generator=generator) * 16).round().clamp(-127, 127) / 16 for x in shapes)


@lru_cache(maxsize=1)
def reference_results(key: ReferenceKey) -> dict[str, Tensor]:
    """Return out, lse, dq, dk and dv of `reference_inputs`, fp64, by RESULT_NAMES.

    Attention is :func:`mindspeed_cp.ops.attention.dense_attention`, and gradients are autograd's, in blocks of rows.
    """
    q, k, v, dout = (x.double() for x in reference_inputs(key))
    results = [q.new_empty(dout.shape), q.new_empty(q.shape[:2]), *(torch.zeros_like(x) for x in (q, k, v))]
    out, lse, dq, dk, dv = results
    q_borders, kv_borders = (Documents(list(x)).offsets.tolist() or [0] for x in (key.lengths, key.kv_lengths))
    for document, ((a, b), (c, d)) in enumerate(zip(pairwise(q_borders), pairwise(kv_borders), strict=True)):
        for first in range(0, b - a, BLOCK_ROWS):
            position_q = torch.arange(first, min(first + BLOCK_ROWS, b - a))
            position_k = _visible_keys(key.attention, first, len(position_q), d - c)
            rows = slice(a + first, a + first + len(position_q))
            keys = slice(c, c) if not len(position_k) else slice(c + int(position_k[0]), c + int(position_k[-1]) + 1)
            leaves = [x.requires_grad_() for x in (q[rows].clone(), k[keys].clone(), v[keys].clone())]
            block = _attend(key.attention, leaves, document, position_q, position_k)
            gradients = torch.autograd.grad(block[0], leaves, dout[rows])
            out[rows], lse[rows] = (x.detach() for x in block)
            dq[rows] = gradients[0]
            dk[keys] += gradients[1]
            dv[keys] += gradients[2]
    return dict(zip(RESULT_NAMES, results, strict=True))


def relative_difference(result: Tensor, reference: Tensor) -> float:
    """Return the largest difference relative to max(1, largest value of the reference); infinite if the result has a
    NaN or an infinite value that the reference does not have."""
    equal = result.double() == reference  # also where both are -inf
    differences = (result.double() - reference).abs().masked_fill(equal, 0.0)
    scale = max(1.0, float(reference[reference.isfinite()].abs().max()))
    largest = float(differences.max()) / scale
    return largest if largest == largest else float("inf")


def _visible_keys(attention: AttentionConfig, first: int, rows: int, keys: int) -> Tensor:
    """Return positions of the keys from the first to the last that a block of rows sees by mask and window."""
    left, right = (-1, -1) if attention.window is None else attention.window
    limits = [0] * (attention.mask == "causal") + [right] * (right != -1)
    start = 0 if left == -1 else min(max(0, first - left), keys)
    stop = min([keys, *(first + rows + limit for limit in limits)])
    return torch.arange(start, max(start, stop))


def _attend(
    attention: AttentionConfig, leaves: list[Tensor], document: int, position_q: Tensor, position_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Return out and lse of rows and keys of one document, by their positions."""
    keep = None
    if attention.dropout:
        heads = torch.arange(attention.heads) + attention.first_head
        keep = keep_mask(*DROPOUT_KEY, heads, document, position_q, position_k, attention.dropout)
    same = torch.zeros_like(position_q), torch.zeros_like(position_k)
    return dense_attention(
        leaves[0], leaves[1], leaves[2], *same, position_q, position_k,
        mask=attention.mask, scale=attention.scale, window=attention.window, slopes=attention.slopes,
        keep=keep, dropout_p=attention.dropout,
    )  # fmt: skip
