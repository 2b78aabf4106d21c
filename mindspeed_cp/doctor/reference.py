"""Inputs of a check, and their dense attention in fp64 on the host: what each device and type is compared with."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention import dense_packed_attention
from mindspeed_cp.plan import AttentionConfig

RESULT_NAMES = ("out", "lse", "dq", "dk", "dv")
DROPOUT_KEY = (1234, 5)  # any seed and layer


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

    Attention is :func:`mindspeed_cp.ops.attention.dense_packed_attention`, and gradients are autograd's.
    """
    q, k, v, dout = (x.double() for x in reference_inputs(key))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dropout_key = DROPOUT_KEY if key.attention.dropout else None
    documents, keys = Documents(list(key.lengths)), Documents(list(key.kv_lengths))
    out, lse = dense_packed_attention(key.attention, q, k, v, documents, kv_documents=keys, dropout_key=dropout_key)
    gradients = torch.autograd.grad(out, leaves, dout)
    return dict(zip(RESULT_NAMES, (out.detach(), lse.detach(), *gradients), strict=True))


def relative_difference(result: Tensor, reference: Tensor) -> float:
    """Return the largest difference relative to max(1, largest value of the reference); infinite if the result has a
    NaN or an infinite value that the reference does not have."""
    equal = result.double() == reference  # also where both are -inf
    differences = (result.double() - reference).abs().masked_fill(equal, 0.0)
    scale = max(1.0, float(reference[reference.isfinite()].abs().max()))
    largest = float(differences.max()) / scale
    return largest if largest == largest else float("inf")
