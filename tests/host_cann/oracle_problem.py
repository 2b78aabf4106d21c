"""The arguments of a call of the fused attention operator in one form, and what each query of the call sees.

Whatever the layout, a call is packed rows [T, heads, dim] cut into sequences; in BSND these are equally long. What CANN
takes, and what of it is modelled, is decided by cann_rules_attention.py, before; the contents of masks are looked at here.

Row i and column j of a sequence of Sq queries and Skv keys; `off` = Skv - Sq puts the origin bottom right:

    mode                  mask tensor           row i sees column j
    0, without a mask     none                  always
    1 (BSND)              full                  where the mask is 0
    3 (TND)               2048x2048, upper      j <= i+off
    4 (TND)               2048x2048, upper      i+off-pre <= j <= i+off+next

Hidden scores are -FLT_MAX, not -inf. A row that sees nothing is forbidden in TND (the rules of lengths see to that); in BSND
the operator would zero it with inner_precise 2, which is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
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
        call: what the rules know of it.
        query, key, value: packed, [T, heads, dim], views of what was given.
        sequences: the rows of each sequence.
        scale: factor of q·k.
        slopes: of ALiBi, [N], or None.
        mask: atten_mask as given, or None.
        drop_mask: bits of the dropout mask, uint8, or None where nothing is dropped.
    """

    call: AttentionCall
    query: Tensor
    key: Tensor
    value: Tensor
    sequences: tuple[Rows, ...]
    scale: float
    slopes: Tensor | None
    mask: Tensor | None
    drop_mask: Tensor | None


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
    for name, ends, x in (("qlen", call.ends_q, call.query), ("kvlen", call.ends_k, call.key)):
        need(
            not call.packed or (ends or (0,))[-1] == x.shape[0],
            f"actual_seq_{name} ends at {(ends or (0,))[-1]}, the tensor has {x.shape[0]} rows; not modelled: rows of no sequence",
        )
    q, k = (pairwise(accumulate(counts, initial=0)) for counts in zip(*call.sequences, strict=True))
    return tuple(Rows(*of_q, *of_k) for of_q, of_k in zip(q, k, strict=True))


@cache
def upper() -> Tensor:
    """The compressed mask: 2048x2048, 1 above the diagonal."""
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def hides(p: Problem, index: int, first: int, last: int, mode: int) -> Tensor | None:
    """True where rows [first, last) of a sequence do not see a column, bool [last - first, Skv]; None: nowhere."""
    if p.mask is None:
        return None
    sq, sk = p.sequences[index].sizes
    i, j, off = torch.arange(first, last)[:, None], torch.arange(sk)[None], sk - sq
    if mode == 1:
        return p.mask[first:last].bool()
    if mode == 4:
        return (j < i + off - p.call.pre_tokens) | (j > i + off + p.call.next_tokens)
    return j > i + (off if mode == 3 else 0)


def check_contents(p: Problem) -> None:
    """Raise Refused for a mask whose contents the mode does not take; on a device this would be a wrong result."""
    if p.mask is None or p.mask.is_meta:
        return
    if p.call.sparse_mode == 1:
        need(
            not bool(p.mask.bool().all(-1).any()), "a row has every key masked: it is zeroed only with inner_precise 2"
        )
        return
    says = f"sparse_mode {p.call.sparse_mode}: the compressed mask must be 1 above the diagonal, 0 elsewhere"
    need(torch.equal(p.mask.bool(), upper()), says)
