"""The online-softmax merge: two partial attentions over disjoint keys become one."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into fp32 accumulators, in place.

    With w = exp(part_lse) / (exp(lse) + exp(part_lse)): out becomes out + w (part - out), lse the log of the sum of
    both exponentials (Milakov and Gimelshein 2018; Dao 2023). Nothing overflows, and rows that have seen no key (lse
    -inf) on either or both sides stay exact: no NaN arises.

    Args:
        out: fp32 [t, heads, dim], updated.
        lse: fp32 [t, heads], updated.
        part: [t, heads, dim], any floating type.
        part_lse: fp32 [t, heads].
    """
    weight = torch.sigmoid(part_lse - lse)
    torch.nan_to_num_(weight, nan=0.0)  # -inf - -inf: no key on either side
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
