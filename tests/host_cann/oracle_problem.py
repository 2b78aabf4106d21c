"""The arguments of a call of the fused attention operator, put into one form.

Whatever the layout, a call is packed rows [T, heads, dim] cut into sequences; in BSND these are equally long. What CANN
takes, and what of it is modelled, is decided by cann_rules.py, before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from tests.host_cann.cann_calls import AttentionCall
from tests.host_cann.cann_rule import need


class Rows(NamedTuple):
    """One sequence (or batch entry): its query rows [q0, q1) and key rows [k0, k1) of the packed tensors."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Sq, Skv."""
        return self.q1 - self.q0, self.k1 - self.k0


@dataclass(frozen=True)
class Problem:
    """A call whose arguments are accepted. Contents of tensors are not looked at: on a device they may not be there
    yet when a call is checked.

    Attributes:
        layout: BSND or TND.
        query, key, value: packed, [T, heads, dim], views of what was given.
        sequences: the rows of each sequence.
        heads, kv_heads: Nq and Nkv.
        scale: factor of q·k.
        slopes: of ALiBi, [N], or None.
        starts: positions of the first query and the first key of each sequence, for slopes.
        mask: atten_mask as given, or None.
        drop_mask: bits of the dropout mask, uint8, or None where nothing is dropped.
    """

    layout: str
    query: Tensor
    key: Tensor
    value: Tensor
    sequences: tuple[Rows, ...]
    heads: int
    kv_heads: int
    scale: float
    slopes: Tensor | None
    starts: tuple[int, int]
    mask: Tensor | None
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    keep_prob: float
    drop_mask: Tensor | None

    @property
    def packed(self) -> bool:
        """Sequences of different lengths."""
        return self.layout == "TND"


def to_rows(x: Tensor, layout: str) -> Tensor:
    """A tensor of that layout as packed rows [T, heads, dim]."""
    return x if layout == "TND" else x.flatten(0, 1)


def from_rows(x: Tensor, layout: str, batch: int) -> Tensor:
    """Inverse of to_rows; the result is contiguous."""
    return x if layout == "TND" else x.unflatten(0, (batch, -1))


def rows_of_sequences(call: AttentionCall) -> tuple[Rows, ...]:
    """The rows of each sequence, or batch entry.

    Raises:
        Refused: rows that belong to no sequence.
    """
    if not call.packed:
        s = call.sizes
        return tuple(Rows(i * s.s1, (i + 1) * s.s1, i * s.s2, (i + 1) * s.s2) for i in range(s.batch))
    both = [ends or () for ends in (call.ends_q, call.ends_k)]
    for name, ends, x in (("qlen", both[0], call.query), ("kvlen", both[1], call.key)):
        need(
            ends[-1] == x.shape[0],
            f"actual_seq_{name} ends at {ends[-1]}, the tensor has {x.shape[0]} rows; not modelled: rows of no sequence",
        )
    q, k = (pairwise((0, *ends)) for ends in both)
    return tuple(Rows(*of_q, *of_k) for of_q, of_k in zip(q, k, strict=True))
