"""What each query of a call sees: the sparse modes of the fused attention operator, and the contents of atten_mask.

Row i and column j of a sequence of Sq queries and Skv keys; `off` = Skv - Sq puts the origin bottom right:

    mode                  mask tensor           row i sees column j
    0, without a mask     none                  always
    1 (BSND)              full                  where the mask is 0
    3 (TND)               2048x2048, upper      j <= i+off
    4 (TND)               2048x2048, upper      i+off-pre <= j <= i+off+next

Hidden scores are -FLT_MAX, not -inf. A row that sees nothing is forbidden in TND (the rules of lengths see to that); in BSND
the operator would zero it with inner_precise 2, which is not modelled. What the operator takes is in cann_rules_attention.py; here is what needs the
contents of the mask.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tests.host_cann.cann_rule import need
from tests.host_cann.oracle_problem import Problem


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
        return (j < i + off - p.pre_tokens) | (j > i + off + p.next_tokens)
    return j > i + (off if mode == 3 else 0)


def check_contents(p: Problem) -> None:
    """Raise Refused for a mask whose contents the mode does not take; on a device this would be a wrong result."""
    if p.mask is None or p.mask.is_meta:
        return
    if p.sparse_mode == 1:
        need(
            not bool(p.mask.bool().all(-1).any()), "a row has every key masked: it is zeroed only with inner_precise 2"
        )
        return
    says = f"sparse_mode {p.sparse_mode}: the compressed mask must be 1 above the diagonal, 0 elsewhere"
    need(torch.equal(p.mask.bool(), upper()), says)
