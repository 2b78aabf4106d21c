"""npu_ring_attention_update: two partial results over different keys merged into one.

    m = max(m1, m2), l = l1 * exp(m1 - m) + l2 * exp(m2 - m),
    out = out1 * l1 * exp(m1 - m) / l + out2 * l2 * exp(m2 - m) / l

in fp32, the output rounded to its type at every call.  Source: the documentation of aclnnRingAttentionUpdateV2.
Whether actual_seq_qlen starts with a 0 is contradictory in public sources; both are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.host_cann import oracle_faults as faults
from tests.host_cann.oracle_rules import MAX_HEADS, MOST_DIM, TYPES, need

Parts = tuple[Tensor, Tensor, Tensor]  # attention output, softmax max, softmax sum


def check_arguments(prev: Parts, cur: Parts, lengths: Tensor | None, layout: str, softmax_layout: str) -> None:
    """Raise Refused for what can be said without the contents of tensors."""
    out, largest, total = prev
    need(layout in ("SBH", "TND"), f"input_layout is {layout!r}; valid: SBH, TND")
    need(softmax_layout in ("", "SBH", "TND"), f"input_softmax_layout is {softmax_layout!r}; valid: '', SBH, TND")
    need(
        out.dtype in TYPES and cur[0].dtype == out.dtype,
        "both outputs must share one type of float16, bfloat16, float32",
    )
    need(all(x.dtype == torch.float32 for x in (*prev[1:], *cur[1:])), "softmax statistics must be float32")
    need(out.dim() == 3 and cur[0].shape == out.shape, f"outputs of shapes {list(out.shape)} and {list(cur[0].shape)}")
    need(
        largest.shape == total.shape == cur[1].shape == cur[2].shape,
        f"statistics of shapes {[list(x.shape) for x in (largest, total, *cur[1:])]}",
    )
    if layout == "SBH":
        s, b, h = out.shape
        fits = largest.dim() == 4 and (largest.shape[0], *largest.shape[2:]) == (b, s, 8)
        need(
            fits and h % largest.shape[1] == 0,
            f"SBH {list(out.shape)}: statistics {list(largest.shape)}; valid: [B, N, S, 8]",
        )
        return
    t, n, d = out.shape
    need(d % 64 == 0 and 0 < d <= MOST_DIM, f"TND: head size is {d}; valid: multiples of 64 up to {MOST_DIM}")
    need(n <= MAX_HEADS, f"TND: {n} heads; at most {MAX_HEADS}")
    need(list(largest.shape) == [t, n, 8], f"TND: statistics {list(largest.shape)}; valid: {[t, n, 8]}")
    need(lengths is not None, "TND needs actual_seq_qlen")
    assert lengths is not None
    need(lengths.dtype == torch.int64 and lengths.dim() == 1, "actual_seq_qlen must be int64 of one dimension")


def ends_of(lengths: Tensor, rows: int) -> list[int]:
    """Cumulative ends of the sequences, without a leading 0. Raises Refused where they do not cover the rows."""
    numbers: Sequence[int] = lengths.tolist()
    ends = list(numbers[1:] if numbers and numbers[0] == 0 else numbers)
    rising = all(a <= b for a, b in zip([0, *ends], ends, strict=False))
    need(bool(ends) and rising and ends[-1] == rows, f"actual_seq_qlen {list(numbers)[:8]} does not cover {rows} rows")
    return ends


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
    """The merged output, max and sum. Raises Refused for lengths that do not fit."""
    (out1, m1, l1), (out2, m2, l2) = prev, cur
    ends = [] if layout == "SBH" or lengths is None else ends_of(lengths, out1.shape[0])
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
