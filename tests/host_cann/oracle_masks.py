"""What each query of a call sees: the sparse modes of the fused attention operator, and the contents of atten_mask.

Row i and column j of a sequence of Sq queries and Skv keys; `off` = Skv - Sq puts the origin bottom right:

    mode                  mask tensor           row i sees column j
    any, without a mask   none                  always
    0                     full                  where the mask is 0; the mask must be 1 outside i-pre <= j <= i+next
    1                     full                  where the mask is 0
    2                     2048x2048, upper      j <= i
    3                     2048x2048, upper      j <= i+off
    4                     2048x2048, upper      i+off-pre <= j <= i+off+next
    5                     full                  j <= i+off or j < prefix; the mask must say the same
    6                     3072x2048             j <= i+off or j < prefix
    7 (TND)               2048x2048, upper      last sequence: mode 4; others: mode 3
    8 (TND)               2048x2048, upper      first sequence: mode 4; others: mode 2

Modes 7 and 8 take the last, or first, sequence that has queries for the band. Hidden scores are -FLT_MAX, not -inf. A row
that sees nothing is forbidden in TND (but in mode 6); elsewhere it is zeroed with inner_precise 2, and in the band and prefix
modes without it (the operator sees there that such rows are), and refused otherwise. What the operator takes is in
cann_rules_masks.py and cann_rules_lengths.py; here is what needs the contents of the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tests.host_cann.cann_calls import UNLIMITED
from tests.host_cann.cann_rule import need
from tests.host_cann.cann_rules_masks import COMPRESSED
from tests.host_cann.oracle_problem import Problem


@dataclass(frozen=True)
class Sight:
    """What the rows of one sequence see: i - left <= j <= i + right, or j < prefix; or what `hidden` [1 | N, Sq, Skv]
    leaves."""

    left: int = UNLIMITED
    right: int = UNLIMITED
    prefix: int = 0
    hidden: Tensor | None = None

    def blind(self, sq: int, sk: int) -> bool:
        """Some row sees nothing."""
        if self.hidden is not None:
            return bool(self.hidden.all(-1).any())
        meets = self.left + self.right >= 0 and self.right >= 0 and sq - 1 - self.left <= sk - 1
        return sq > 0 and not meets and self.prefix == 0

    def hides(self, first: int, last: int, sk: int) -> Tensor:
        """True where rows [first, last) do not see a column: bool [1 | N, last - first, Skv]."""
        if self.hidden is not None:
            return self.hidden[:, first:last]
        i, j = torch.arange(first, last)[:, None], torch.arange(sk)[None]
        outside = (j < i - self.left) | (j > i + self.right)
        return (outside & (j >= self.prefix))[None]


@cache
def upper(rows: int) -> Tensor:
    """The compressed mask: 2048x2048, 1 above the diagonal; for mode 6 1024 rows more, 1 in their right half."""
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    if rows == 2048:
        return mask
    below = torch.zeros(1024, 2048, dtype=torch.bool)
    below[:, 1024:] = True
    return torch.cat([mask, below])


def band_sequence(p: Problem) -> int:
    """Index of the sequence that modes 7 and 8 treat as a band."""
    present = [i for i, x in enumerate(p.sequences) if x.sizes[0]]
    return (present or [0])[-1 if p.sparse_mode == 7 else 0]


def sight(p: Problem, index: int) -> Sight:
    """What the rows of a sequence see by the arguments (modes 0, 1 and 5 look into the mask)."""
    sq, sk = p.sequences[index].sizes
    off, mode = sk - sq, p.sparse_mode
    if p.mask is None:
        return Sight()
    if mode in (0, 1, 5):
        mask = p.mask.bool()
        while mask.dim() > 2:  # [B | 1, N | 1, Sq, Skv]
            mask = mask[min(index, mask.shape[0] - 1)] if mask.dim() == 4 else mask
            if mask.dim() == 3:
                return Sight(hidden=mask[:, :sq, :sk])
        return Sight(hidden=mask[None, :sq, :sk])
    if mode in (7, 8):
        mode = 4 if index == band_sequence(p) else {7: 3, 8: 2}[mode]
    if mode == 2:
        return Sight(right=0)
    if mode == 4:
        return Sight(left=p.pre_tokens - off, right=p.next_tokens + off)
    return Sight(right=off, prefix=p.prefix[index] if mode == 6 else 0)


def refuse_blind_rows(p: Problem, index: int, seen: Sight) -> None:
    """Raise Refused where a row sees nothing and the operator does not zero it."""
    if seen.blind(*p.sequences[index].sizes):
        need(not p.packed or p.sparse_mode == 6, f"TND: a row of sequence {index} has every key masked")
        zeroed = p.inner_precise == 2 or p.sparse_mode in (3, 4, 5, 6)
        need(zeroed, "a row has every key masked: it is zeroed only with inner_precise 2")


def check_arguments(p: Problem) -> None:
    """Raise Refused where rows see nothing by the arguments alone, and the operator does not zero them."""
    if p.mask is not None and p.sparse_mode in COMPRESSED:
        for i in range(len(p.sequences)):
            refuse_blind_rows(p, i, sight(p, i))


def check_contents(p: Problem) -> None:
    """Raise Refused for a mask whose contents the mode does not take; on a device this would be a wrong result."""
    mode, mask = p.sparse_mode, p.mask
    if mask is None or mask.is_meta:
        return
    if mode in COMPRESSED:
        want = upper(mask.shape[-2])
        need(
            torch.equal(mask.bool().view(want.shape), want),
            f"sparse_mode {mode}: the compressed mask must be 1 above the diagonal{' (and prefix rows)' if mode == 6 else ''}, 0 elsewhere",
        )
        return
    for i, x in enumerate(p.sequences):
        if not x.sizes[0]:
            continue
        seen = sight(p, i)
        assert seen.hidden is not None
        if mode == 0:
            outside = Sight(p.pre_tokens, p.next_tokens).hides(0, *x.sizes)
            need(
                bool((seen.hidden | ~outside).all()),
                f"sparse_mode 0: atten_mask shows columns outside pre_tokens {p.pre_tokens}, next_tokens {p.next_tokens}",
            )
        if mode == 5:
            want = Sight(right=x.sizes[1] - x.sizes[0], prefix=p.prefix[i]).hides(0, *x.sizes)
            need(bool((seen.hidden == want).all()), "sparse_mode 5: atten_mask is not what prefix says")
        refuse_blind_rows(p, i, seen)
