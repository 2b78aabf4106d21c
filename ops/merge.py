"""Online-softmax merge of two partial attention results over disjoint keys."""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements of `out` merged at a time on a CPU: 1 MiB in fp32, so that the converted part fits the cache of one core. On
#: a device all are merged at once, because launches cost more there.
CHUNK = 1 << 18


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into fp32 accumulators, in place.

    With w = exp(part_lse) / (exp(lse) + exp(part_lse)): out becomes out + w (part - out), lse the log of the sum of
    both exponentials (Milakov and Gimelshein 2018; Dao 2023). Nothing overflows, and rows without a visible key (lse
    -inf) on one or both sides stay exact, without NaN.

    Args:
        out: fp32 [t, heads, dim], updated.
        lse: fp32 [t, heads], updated.
        part: [t, heads, dim], any floating type.
        part_lse: fp32 [t, heads].
    """
    if out.device.type != "cpu":
        _merge_chunk(out, lse, part, part_lse)
        return
    rows = max(1, CHUNK // max(1, out[0].numel())) if len(out) else 1
    for chunks in zip(*(x.split(rows) for x in (out, lse, part, part_lse)), strict=True):
        _merge_chunk(*chunks)


def _merge_chunk(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    weight = torch.sigmoid(part_lse - lse)
    torch.nan_to_num_(weight, nan=0.0)  # -inf - -inf: no key on either side
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
