"""npu_ring_attention_update: two partial results over different keys merged into one.

    m = max(m1, m2), l = l1 * exp(m1 - m) + l2 * exp(m2 - m),
    out = out1 * l1 * exp(m1 - m) / l + out2 * l2 * exp(m2 - m) / l

in fp32, the output rounded to its type at every call.  Source: the documentation of aclnnRingAttentionUpdateV2.
In TND actual_seq_qlen begins with a 0: CANN's tiling counts a sequence less than it has numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.host_cann import cann_rules
from tests.host_cann import oracle_faults as faults
from tests.host_cann.cann_calls import Shaped, UpdateCall, shaped

Parts = tuple[Tensor, Tensor, Tensor]  # attention output, softmax max, softmax sum


def call_of(
    prev: Parts, cur: Parts, lengths: Tensor | None, layout: str, softmax_layout: str, read: bool = False
) -> UpdateCall:
    """The call as the rules see it. read: with the numbers of actual_seq_qlen, which are known when it runs."""
    ends = tuple(lengths.tolist()) if read and lengths is not None and lengths.dim() == 1 else None
    parts = [tuple(Shaped(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in part) for part in (prev, cur)]
    return UpdateCall(*parts, layout, softmax_layout, shaped(lengths), ends)  # type: ignore[arg-type]  # three each


def spread(layout: str, softmax_layout: str, out: Tensor, heads: int, ends: list[int]) -> Callable[[Tensor], Tensor]:
    """What brings a statistic's numbers to the elements of the output."""
    if layout == "SBH":
        return lambda x: x[..., 0].permute(2, 0, 1).repeat_interleave(out.shape[2] // heads, -1)
    if softmax_layout == "TND":
        return lambda x: x[..., :1]
    cuts = list(zip([0, *ends], ends, strict=False))

    def per_sequence(x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        parts = [flat[a * heads * 8 : b * heads * 8].view(heads, b - a, 8) for a, b in cuts]
        return torch.cat([y[..., :1].transpose(0, 1) for y in parts])

    return per_sequence


def merge(prev: Parts, cur: Parts, lengths: Tensor | None, layout: str, softmax_layout: str) -> Parts:
    """The merged output, max and sum. Raises Refused for a call that breaks a rule."""
    (out1, m1, l1), (out2, m2, l2) = prev, cur
    cann_rules.check(call_of(prev, cur, lengths, layout, softmax_layout, read=True))
    ends = [] if layout == "SBH" or lengths is None else lengths.tolist()[1:]
    to_rows = spread(layout, softmax_layout, out1, m1.shape[1], ends)
    m = torch.maximum(m1, m2)
    a, b = l1 * (m1 - m).exp(), l2 * (m2 - m).exp()
    if faults.on(faults.UPDATE):
        a, b = l1, l2
    total = a + b
    if faults.on(faults.UPDATE_OUT):
        return out1, m, total
    out = out1.float() * to_rows(a / total) + out2.float() * to_rows(b / total)
    return out.to(out1.dtype), m, total
