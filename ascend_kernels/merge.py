"""Any number of partial attention results merged into fp32 accumulators, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import check_tensor, current, grid, implementation_for, need, power_of_two

#: Elements of `out` that a program holds.
ELEMENTS = 2048

#: A maximum that is no greater is one of masked scores alone: the NPU's operator masks by -FLT_MAX, 3.4e38. Half of it
#: is as far from any score.
MASKED = -(2.0**127)


def merge_parts_(out: Tensor, lse: Tensor, parts: Tensor, part_lse: Tensor, implementation: str | None = None) -> None:
    """Merge partial results over disjoint keys into accumulators, in place.

    With weights w_p = exp(lse_p) / sum of exp(lse_p) over the accumulator and all parts, out becomes the sum of
    w_p out_p and lse the log of that sum (online softmax: Milakov and Gimelshein 2018). Rows that have seen no key have
    lse -inf, and whatever stands in their out counts as nothing; a row of which all are -inf gets out 0.

    Args:
        out: fp32 [t, heads, dim], contiguous, updated.
        lse: fp32 [t, heads], contiguous, updated.
        parts: [parts, t, heads, dim], any floating type; contiguous within a part.
        part_lse: fp32 [parts, t, heads], contiguous within a part.
        implementation: see :func:`implementation_for`.

    Raises:
        ConfigError: shapes or types do not go together.
    """
    _check(out, lse, parts)
    check_tensor("part_lse", part_lse, [len(parts), *lse.shape], torch.float32, out, within=True)
    if implementation_for(out, implementation) == "triton":
        _launch(out, lse, parts, part_lse, None, None, 1)
        return
    for part, its_lse in zip(parts, part_lse, strict=True):
        _merge(out, lse, part, its_lse)


def merge_statistics_(
    out: Tensor,
    lse: Tensor,
    parts: Tensor,
    maxima: Tensor,
    sums: Tensor,
    places: Tensor | None = None,
    times: int = 8,
    implementation: str | None = None,
) -> None:
    """The same from the statistics of the NPU's operator: maximum and sum of exp(score - maximum) of each row, each
    `times` times, in an order of its own.

    A row that saw no key of a part is one whose maximum is MASKED or less, as that of masked scores is (the operator
    gives -FLT_MAX beside a sum of +FLT_MAX, or, where it averages all values, beside the number of keys), or one
    whose sum is 0. It counts as nothing; lse is -inf where no part saw a key.

    Args:
        out, lse, parts: as for :func:`merge_parts_`.
        maxima, sums: fp32 [parts, t * heads * times], contiguous.
        places: int32 [t * heads], contiguous: the statistic of row r and head h is number places[r * heads + h], each
            below t * heads (`mindspeed_cp.ops.attention.npu_statistics`); None: in the order of rows.
        times: how often each statistic is repeated.

    Raises:
        ConfigError: shapes or types do not go together.
    """
    _check(out, lse, parts)
    need(times >= 1, "times", times, "1 or more")
    for name, x in (("maxima", maxima), ("sums", sums)):
        check_tensor(name, x, [len(parts), lse.numel() * times], torch.float32, out)
    if places is not None:
        check_tensor("places", places, [lse.numel()], torch.int32, out)
    if implementation_for(out, implementation) == "triton":
        _launch(out, lse, parts, maxima, sums, places, times)
        return
    for part, high, total in zip(parts, maxima, sums, strict=True):
        seen = (total > 0) & (high > MASKED)
        found = torch.where(seen, high + total.log(), float("-inf")).view(-1, times)[:, 0]
        _merge(out, lse, part, (found if places is None else found[places.long()]).view(lse.shape))


def _check(out: Tensor, lse: Tensor, parts: Tensor) -> None:
    need(out.dim() == 3, "out's shape", list(out.shape), "[t, heads, dim]")
    need(out.dtype == lse.dtype == torch.float32, "out and lse", f"{out.dtype} and {lse.dtype}", "fp32")
    check_tensor("out", out, out.shape, torch.float32, out)
    check_tensor("lse", lse, out.shape[:2], torch.float32, out)
    need(parts.shape[1:] == out.shape, "parts' shape", list(parts.shape), f"[parts, {', '.join(map(str, out.shape))}]")
    check_tensor("parts", parts, parts.shape, None, out, within=True)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """One part, in torch."""
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(nan=0.0).unsqueeze(-1)
    dead = part_lse.unsqueeze(-1) == float("-inf")
    out.masked_fill_((lse == float("-inf")).unsqueeze(-1), 0.0)
    out.lerp_(part.to(out.dtype).masked_fill(dead, 0.0), weight)
    torch.logaddexp(lse, part_lse, out=lse)


def _launch(
    out: Tensor, lse: Tensor, parts: Tensor, maxima: Tensor, sums: Tensor | None, places: Tensor | None, times: int
) -> None:
    from mindspeed_cp.ascend_kernels.device.merge import merge_kernel

    rows, dim = lse.numel(), out.shape[-1]
    if not rows or not len(parts):
        return
    width = max(1, power_of_two(dim))
    block = max(1, ELEMENTS // width)
    blocks = -(-rows // block)
    with current(out):
        merge_kernel[grid(blocks)](
            out, lse, parts, maxima, maxima if sums is None else sums, maxima if places is None else places,
            rows, blocks, parts.stride(0), maxima.stride(0),
            PARTS=len(parts), DIM=dim, WIDTH=width, BLOCK=block, TIMES=times,
            HAS_SUMS=sums is not None, HAS_PLACES=places is not None, MASKED=MASKED,
        )  # fmt: skip
