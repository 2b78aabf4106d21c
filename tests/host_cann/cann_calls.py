"""Calls of CANN's operators as the rules see them: shapes, types and numbers, no tensors and no torch.

The stand-in describes every call that reaches it in this form, and a test may describe a call that was never made: the
rules cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

UNLIMITED = 2**31 - 1  # default of pre_tokens and next_tokens


WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}  # of types with more than one byte, in masks and slopes


class Shaped(NamedTuple):
    """Shape and type of a tensor, for instance ((6, 2, 64), "float32")."""

    shape: tuple[int, ...]
    dtype: str


def shaped(x: Any) -> Shaped | None:
    """Shape and type of a tensor of torch; None for None."""
    if x is None or isinstance(x, Shaped):
        return x
    return Shaped(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def bytes_of(x: Shaped | None) -> int:
    """Bytes of a tensor; 0 for None."""
    return 0 if x is None else prod(x.shape) * WIDTHS.get(x.dtype, 1)


class Sizes(NamedTuple):
    """What a layout says about a call, without its sequences."""

    batch: int
    s1: int
    s2: int
    heads: int
    kv_heads: int
    d: int
    dk: int
    dv: int


@dataclass(frozen=True)
class AttentionCall:
    """A call of FlashAttentionScore, or of its gradient, in any version and layout.

    Attributes:
        gradient: the call is one of the gradient.
        layout: in capitals; only TND and BSND are modelled.
        ends_q, ends_k: actual_seq_qlen and actual_seq_kvlen; None where none are given.
        q_start, kv_start: q_start_idx and kv_start_idx; empty where none are given.
        dy, softmax_max, softmax_sum, attention_in: of the gradient only.
    """

    query: Shaped
    key: Shaped
    value: Shaped
    head_num: int
    layout: str
    gradient: bool = False
    pse: Shaped | None = None
    atten_mask: Shaped | None = None
    drop_mask: Shaped | None = None
    keep_prob: float = 1.0
    pre_tokens: int = UNLIMITED
    next_tokens: int = UNLIMITED
    ends_q: tuple[int, ...] | None = None
    ends_k: tuple[int, ...] | None = None
    sparse_mode: int = 0
    pse_type: int = 1
    q_start: tuple[int, ...] = ()
    kv_start: tuple[int, ...] = ()
    dy: Shaped | None = None
    softmax_max: Shaped | None = None
    softmax_sum: Shaped | None = None
    attention_in: Shaped | None = None

    @property
    def operator(self) -> str:
        """Name of the operator."""
        return "fused_attention_grad" if self.gradient else "fused_attention"

    @property
    def mask_bytes(self) -> int:
        """Bytes of the mask."""
        return bytes_of(self.atten_mask)

    @property
    def pse_bytes(self) -> int:
        """Bytes of the slopes."""
        return bytes_of(self.pse)

    @property
    def drop_bytes(self) -> int:
        """Bytes of the dropout mask."""
        return bytes_of(self.drop_mask)

    @property
    def packed(self) -> bool:
        """Sequences of different lengths."""
        return self.layout == "TND"

    @cached_property
    def sizes(self) -> Sizes:
        """Batch, rows, heads and widths; of a call whose layout, dimensions and head_num are in order. In TND the
        rows are those of the longest sequences."""
        q, k = self.query.shape, self.key.shape
        widths = q[-1], k[-1], self.value.shape[-1]
        if self.packed:
            longest = (max(x) for x in zip(*self.sequences, strict=True)) if self.sequences else (0, 0)
            return Sizes(len(self.sequences), *longest, q[1], k[1], *widths)
        return Sizes(q[0], q[1], k[1], q[2], k[2], *widths)

    @cached_property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(Sq, Skv) of each sequence of TND; in BSND of each batch entry."""
        if not self.packed:
            return ((self.sizes.s1, self.sizes.s2),) * self.sizes.batch
        lengths = ([b - a for a, b in pairwise((0, *(ends or ())))] for ends in (self.ends_q, self.ends_k))
        return tuple(zip(*lengths, strict=False))


@dataclass(frozen=True)
class UpdateCall:
    """A call of RingAttentionUpdate in SBH: attention output, maximum and sum of both parts."""

    prev: tuple[Shaped, Shaped, Shaped]
    cur: tuple[Shaped, Shaped, Shaped]
    operator = "ring_attention_update"


class Item(NamedTuple):
    """An entry of a list of HcclBatchSendRecv: "send" or "recv", the other rank, elements and HCCL's number of their
    type."""

    direction: str
    peer: int
    count: int
    dtype: int


@dataclass(frozen=True)
class BatchCall:
    """A call of HcclBatchSendRecv.

    Attributes:
        items: the list.
        rank, ranks: own number and number of ranks of the communicator.
        virtual_stages: model chunks of each pipeline stage of the program; 1: no virtual pipeline.
    """

    items: Sequence[Item]
    rank: int
    ranks: int
    virtual_stages: int = 1
