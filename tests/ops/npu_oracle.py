"""The stand-in's fused operators on CPU tensors, as the npu backend calls them: a test double, with the real rules."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from mindspeed_cp.ops.attention.npu.fused_operator import DropoutState, FusedArguments
from tests.host_cann import oracle


class OracleOperator:
    """FusedOperator over tests.host_cann.oracle. Seeds of dropout count up from 1."""

    def __init__(self) -> None:
        self.seed = self.updates = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: FusedArguments
    ) -> tuple[Tensor, Tensor, Tensor, DropoutState]:
        self.seed += 1
        rng_state = (
            self.seed,
            0,
            oracle.dropout_numels(arguments.heads, sizes(q, k, arguments)) if arguments.keep_prob < 1 else 0,
        )
        given = dict(scale=arguments.scale, **oracle_keywords(arguments, rng_state))
        return *oracle.fused_attention(q, k, v, arguments.heads, arguments.layout, **given), rng_state

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, softmax_max: Tensor, softmax_sum: Tensor, rng_state: DropoutState,
        arguments: FusedArguments,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        given = dict(softmax_max=softmax_max, softmax_sum=softmax_sum, attention_in=out, scale_value=arguments.scale)
        return oracle.fused_attention_grad(
            q, k, v, dout, arguments.heads, arguments.layout, **given, **oracle_keywords(arguments, rng_state)
        )

    def update(self, before: tuple[Tensor, Tensor, Tensor], part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        self.updates += 1
        return oracle.ring_attention_update(*before, *part, input_layout="SBH")


def sizes(q: Tensor, k: Tensor, arguments: FusedArguments) -> list[tuple[int, int]]:
    """(Sq, Skv) of each sequence or batch entry."""
    if arguments.actual_seq_qlen is None or arguments.actual_seq_kvlen is None:
        return [(q.shape[1], k.shape[1])] * q.shape[0]
    pairs = zip(pairwise([0, *arguments.actual_seq_qlen]), pairwise([0, *arguments.actual_seq_kvlen]), strict=True)
    return [(b - a, d - c) for (a, b), (c, d) in pairs]


def oracle_keywords(arguments: FusedArguments, rng_state: DropoutState) -> Mapping[str, object]:
    """Of the oracle: a dropout mask in place of the seed that it is made from."""
    bits = oracle.dropout_bits(*rng_state, 1 - arguments.keep_prob) if arguments.keep_prob < 1 else None
    return dict(arguments.operator_keywords(), drop_mask=bits)


def kept_weights(heads: int, sizes: list[tuple[int, int]], rng_state: DropoutState, keep_prob: float) -> list[Tensor]:
    """Which weights of each sequence of a call are not dropped, bool [heads, Sq, Skv]."""
    bits = oracle.dropout_bits(*rng_state, 1 - keep_prob)
    flat = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[: rng_state[2]].bool()
    parts = flat.split([heads * a * b for a, b in sizes])
    return [part.view(heads, a, b) for part, (a, b) in zip(parts, sizes, strict=True)]
