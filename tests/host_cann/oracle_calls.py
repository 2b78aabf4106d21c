"""A record of the calls that the oracle computed: what tests count, and what the memory table is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.host_cann.oracle_problem import Problem


@dataclass(frozen=True)
class Call:
    """A call that was computed.

    Attributes:
        operator: "fused_attention", "fused_attention_grad" or "ring_attention_update".
        layout, sparse_mode, pse_type, dtype: as given.
        sizes: (Sq, Skv) of each sequence or batch entry.
        shapes: of every tensor that was given.
        mask_bytes, pse_bytes, drop_bytes: of atten_mask, pse and the dropout mask, 0 where there is none.
        starts: (q_start, kv_start); (0, 0) where none are given.
        tokens: (pre_tokens, next_tokens).
    """

    operator: str
    layout: str
    sparse_mode: int
    pse_type: int
    dtype: torch.dtype
    sizes: tuple[tuple[int, int], ...]
    shapes: Mapping[str, tuple[int, ...]]
    mask_bytes: int
    pse_bytes: int
    drop_bytes: int
    starts: tuple[int, int]
    tokens: tuple[int, int]


#: Every call that was computed, in order.
calls: list[Call] = []


def size_of(x: Tensor | None) -> int:
    """Bytes of a tensor's elements."""
    return 0 if x is None else x.numel() * x.element_size()


def record(operator: str, p: Problem, **tensors: Tensor | None) -> None:
    """Add the call to `calls`."""
    given = dict(tensors, atten_mask=p.mask, pse=p.slopes, drop_mask=p.drop_mask)
    shapes = {name: tuple(x.shape) for name, x in given.items() if x is not None}
    sizes = tuple(x.sizes for x in p.sequences)
    counts = (size_of(p.mask), size_of(p.slopes), size_of(p.drop_mask))
    pse_type = 1 if p.slopes is None else 2
    common = (operator, p.layout, p.sparse_mode, pse_type, p.query.dtype, sizes, shapes)
    calls.append(Call(*common, *counts, p.starts, (p.pre_tokens, p.next_tokens)))


def record_update(layout: str, parts: tuple[Tensor, Tensor, Tensor]) -> None:
    """Add a call of ring_attention_update to `calls`."""
    shapes = {name: tuple(x.shape) for name, x in zip(("attn_out", "softmax_max", "softmax_sum"), parts, strict=True)}
    calls.append(Call("ring_attention_update", layout, 0, 1, parts[0].dtype, (), shapes, 0, 0, 0, (0, 0), (0, 0)))
