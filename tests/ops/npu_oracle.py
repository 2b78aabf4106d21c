"""The stand-in's fused operators on CPU tensors, as the npu backend calls them: a test double, with the real rules."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from mindspeed_cp.ops.attention.npu_operator import Kept, Masking
from tests.host_cann import oracle


class OracleOperator:
    """FusedOperator over tests.host_cann.oracle. Seeds of dropout count up from 1."""

    def __init__(self) -> None:
        self.seed = self.updates = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Masking) -> tuple[Tensor, Tensor, Tensor, Kept]:
        self.seed += 1
        kept = self.seed, 0, oracle.dropout_numels(how.heads, sizes(q, k, how)) if how.keep_prob < 1 else 0
        given = dict(scale=how.scale, **arguments(how, kept))
        return *oracle.fused_attention(q, k, v, how.heads, how.layout, **given), kept

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, most: Tensor, total: Tensor, kept: Kept,
        how: Masking,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        given = dict(softmax_max=most, softmax_sum=total, attention_in=out, scale_value=how.scale)
        return oracle.fused_attention_grad(q, k, v, dout, how.heads, how.layout, **given, **arguments(how, kept))

    def update(self, before: tuple[Tensor, Tensor, Tensor], part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        self.updates += 1
        return oracle.ring_attention_update(*before, *part, input_layout="SBH")


def sizes(q: Tensor, k: Tensor, how: Masking) -> list[tuple[int, int]]:
    """(Sq, Skv) of each sequence."""
    if how.cu_q is None or how.cu_k is None:
        return [(q.shape[1], k.shape[1])]
    pairs = zip(pairwise([0, *how.cu_q]), pairwise([0, *how.cu_k]), strict=True)
    return [(b - a, d - c) for (a, b), (c, d) in pairs]


def arguments(how: Masking, kept: Kept) -> Mapping[str, object]:
    """Of the oracle: a dropout mask in place of the seed that it is made from."""
    bits = oracle.dropout_bits(*kept, 1 - how.keep_prob) if how.keep_prob < 1 else None
    return dict(how.arguments(), drop_mask=bits)


def kept_weights(heads: int, sizes: list[tuple[int, int]], kept: Kept, keep_prob: float) -> list[Tensor]:
    """Which weights of each sequence of a call are not dropped, bool [heads, Sq, Skv]."""
    bits = oracle.dropout_bits(*kept, 1 - keep_prob)
    flat = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[: kept[2]].bool()
    parts = flat.split([heads * a * b for a, b in sizes])
    return [part.view(heads, a, b) for part, (a, b) in zip(parts, sizes, strict=True)]
