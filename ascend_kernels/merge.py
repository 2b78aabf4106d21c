"""Merge of any number of partial attention results into fp32 accumulators, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import (
    check_memory,
    device_guard,
    implementation_for,
    launch_grid,
    next_power_of_2,
)

#: Elements of `out` that one program holds.
PROGRAM_ELEMENTS = 2048


def merge_parts_(out: Tensor, lse: Tensor, parts: Tensor, part_lse: Tensor, implementation: str | None = None) -> None:
    """Merge partial results over disjoint keys into accumulators, in place.

    With weights w_p = exp(lse_p) / sum of exp(lse_p) over the accumulator and all parts, out becomes the sum of
    w_p out_p and lse the log of that sum (online softmax: Milakov and Gimelshein 2018). Rows without a visible key have
    lse -inf; their out is ignored and may hold anything. A row whose lse are all -inf gets out 0.

    Args:
        out: fp32 [t, heads, dim], contiguous, updated.
        lse: fp32 [t, heads], contiguous, updated.
        parts: [parts, t, heads, dim], any floating type; contiguous within a part.
        part_lse: fp32 [parts, t, heads], contiguous within a part.
        implementation: see :func:`implementation_for`.

    Raises:
        ConfigError: a tensor is not contiguous, or on another device.
    """
    check_memory(out=out, lse=lse, parts=parts[:1], part_lse=part_lse[:1])
    if implementation_for(out, implementation) == "triton":
        _launch(out, lse, parts, part_lse)
        return
    for part, its_lse in zip(parts, part_lse, strict=True):
        _merge(out, lse, part, its_lse)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge one part in torch."""
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(nan=0.0).unsqueeze(-1)
    empty = part_lse.unsqueeze(-1) == float("-inf")
    out.masked_fill_((lse == float("-inf")).unsqueeze(-1), 0.0)
    out.lerp_(part.to(out.dtype).masked_fill(empty, 0.0), weight)
    torch.logaddexp(lse, part_lse, out=lse)


def _launch(out: Tensor, lse: Tensor, parts: Tensor, part_lse: Tensor) -> None:
    from mindspeed_cp.ascend_kernels.device.merge import merge_kernel

    rows, dim = lse.numel(), out.shape[-1]
    if not rows or not len(parts):
        return
    width = max(1, next_power_of_2(dim))
    block = max(1, PROGRAM_ELEMENTS // width)
    blocks = -(-rows // block)
    with device_guard(out):
        merge_kernel[launch_grid(blocks)](
            out, lse, parts, part_lse, rows, blocks, parts.stride(0), part_lse.stride(0),
            PARTS=len(parts), DIM=dim, WIDTH=width, BLOCK=block,
        )  # fmt: skip
