"""Calls of CANN's operators as the rules see them: shapes, types and numbers, no tensors and no torch.

The stand-in describes every call that reaches it in this form, and a test may describe a call that was never made: the
rules cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

UNLIMITED = 2**31 - 1  # default of pre_tokens and next_tokens


class Shaped(NamedTuple):
    """Shape and type of a tensor, for instance ((6, 2, 64), "float32")."""

    shape: tuple[int, ...]
    dtype: str


def shaped(x: Any) -> Shaped | None:
    """Shape and type of a tensor of torch; None for None."""
    if x is None or isinstance(x, Shaped):
        return x
    return Shaped(tuple(x.shape), str(x.dtype).removeprefix("torch."))


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
        layout: in capitals.
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
    padding_mask: Shaped | None = None
    atten_mask: Shaped | None = None
    drop_mask: Shaped | None = None
    keep_prob: float = 1.0
    pre_tokens: int = UNLIMITED
    next_tokens: int = UNLIMITED
    inner_precise: int = 0
    prefix: tuple[int, ...] = ()
    ends_q: tuple[int, ...] | None = None
    ends_k: tuple[int, ...] | None = None
    sparse_mode: int = 0
    pse_type: int = 1
    q_start: tuple[int, ...] = ()
    kv_start: tuple[int, ...] = ()
    softmax_layout: str = ""
    dy: Shaped | None = None
    softmax_max: Shaped | None = None
    softmax_sum: Shaped | None = None
    attention_in: Shaped | None = None

    @property
    def packed(self) -> bool:
        """Sequences of different lengths."""
        return self.layout == "TND"

    @cached_property
    def sizes(self) -> Sizes:
        """Batch, rows, heads and widths; of a call whose layout, dimensions and head_num are in order. In TND the
        rows are those of the longest sequences."""
        q, k, v, n = self.query.shape, self.key.shape, self.value.shape, self.head_num
        if self.layout in ("BSH", "SBH"):
            d = q[2] // n
            kv_heads = k[2] // d
            batch, s1, s2 = (q[0], q[1], k[1]) if self.layout == "BSH" else (q[1], q[0], k[0])
            return Sizes(batch, s1, s2, n, kv_heads, d, d, v[2] // kv_heads)
        widths = q[-1], k[-1], v[-1]
        if self.packed:
            longest = (max(x) for x in zip(*self.sequences, strict=True)) if self.sequences else (0, 0)
            return Sizes(len(self.sequences), *longest, q[1], k[1], *widths)
        heads, rows = (1, 2) if self.layout == "BNSD" else (2, 1)
        return Sizes(q[0], q[rows], k[rows], q[heads], k[heads], *widths)

    @cached_property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(Sq, Skv) of each sequence of TND; in the other layouts of each batch entry."""
        if not self.packed:
            return ((self.sizes.s1, self.sizes.s2),) * self.sizes.batch
        lengths = ([b - a for a, b in pairwise((0, *(ends or ())))] for ends in (self.ends_q, self.ends_k))
        pairs = list(zip(*lengths, strict=False))
        while (
            len(pairs) > 1 and self.ends_q and self.ends_q[len(pairs) - 1] == 0 == (self.ends_k or (1,))[len(pairs) - 1]
        ):
            pairs.pop()  # zeros at the end: entries that take no part
        return tuple(pairs)

    @cached_property
    def band_index(self) -> int:
        """Number of the sequence that sparse modes 7 and 8 treat as a band: the last, or first, that has queries."""
        present = [i for i, (sq, _) in enumerate(self.sequences) if sq]
        return (present or [0])[-1 if self.sparse_mode == 7 else 0]


@dataclass(frozen=True)
class UpdateCall:
    """A call of RingAttentionUpdate.

    Attributes:
        prev, cur: attention output, maximum and sum of both parts.
        lengths: actual_seq_qlen; None where it is not given.
        ends: its numbers; None where they are not known (on a device they are read by the kernel).
    """

    prev: tuple[Shaped, Shaped, Shaped]
    cur: tuple[Shaped, Shaped, Shaped]
    layout: str = "SBH"
    softmax_layout: str = ""
    lengths: Shaped | None = None
    ends: tuple[int, ...] | None = None


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
        chip: name of the chip, for instance "Ascend910B1".
        in_flight: calls of this process that have not ended, this one included, counted once for each stream: those
            of one stream come one after the other.
        virtual_stages: model chunks of each pipeline stage of the program; 1: no virtual pipeline.
    """

    items: Sequence[Item]
    rank: int
    ranks: int
    chip: str = "Ascend910B1"
    in_flight: int = 1
    virtual_stages: int = 1
