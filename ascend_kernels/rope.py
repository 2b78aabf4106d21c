"""Rotary positions by a tensor of positions, fused with the gather of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import check_tensor, current, grid, implementation_for, need, power_of_two

#: Elements of one half that a program turns.
ELEMENTS = 2048


def rope_gather(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    rows: Tensor | None = None,
    factor: float = 1.0,
    interleaved: bool = False,
    backward: bool = False,
    implementation: str | None = None,
) -> Tensor:
    """Rows of x, each turned by its position (Su et al., arXiv 2104.09864).

    Channels c and c + n, with n frequencies, or with `interleaved` 2c and 2c + 1, turn by positions * frequencies[c]
    and are multiplied by `factor` (YaRN's); channels behind 2n are copied. All is computed in fp32 and rounded once.

    Args:
        x: [source rows, heads, dim], contiguous.
        positions: int32 [rows], contiguous, of the rows of the result.
        frequencies: fp32 [n], contiguous, 2n <= dim; radians for each position.
        rows: int32 [rows], contiguous, the row of x that each comes from; None: the same.
        factor: of both cos and sin.
        interleaved: which channels make a pair.
        backward: turn back: the gradient of a row of x from that of the result (where several rows come from one,
            their gradients are still to be added up).
        implementation: see :func:`implementation_for`.

    Returns:
        [rows, heads, dim] of x's type.

    Raises:
        ConfigError: shapes or types do not go together.
    """
    need(x.dim() == 3 and x.is_contiguous(), "x", f"of shape {list(x.shape)}", "[rows, heads, dim], contiguous")
    check_tensor("x", x, x.shape, None, x)
    half = frequencies.numel()
    need(2 * half <= x.shape[-1], "the number of frequencies", half, f"at most {x.shape[-1] // 2}")
    check_tensor("frequencies", frequencies, [half], torch.float32, x)
    need(rows is not None or positions.numel() == len(x), "the number of positions", positions.numel(), f"{len(x)}")
    check_tensor("positions", positions, [positions.numel()], torch.int32, x)
    if rows is not None:
        check_tensor("rows", rows, positions.shape, torch.int32, x)
    sign = -1 if backward else 1
    if implementation_for(x, implementation) == "triton":
        return _launch(x, positions, frequencies, rows, factor, interleaved, sign)
    given = (x if rows is None else x.index_select(0, rows)).float()
    angle = positions.float()[:, None, None] * frequencies
    cos, sin = angle.cos() * factor, angle.sin() * factor * sign
    ends = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    low, high = (given[..., end] for end in ends)
    out = given.clone()
    out[..., ends[0]], out[..., ends[1]] = low * cos - high * sin, high * cos + low * sin
    return out.to(x.dtype)


def _launch(
    x: Tensor, positions: Tensor, frequencies: Tensor, rows: Tensor | None, factor: float, interleaved: bool, sign: int
) -> Tensor:
    from mindspeed_cp.ascend_kernels.device.rope import rope_kernel

    heads, dim, half = x.shape[1], x.shape[2], len(frequencies)
    out = torch.empty(len(positions), heads, dim, dtype=x.dtype, device=x.device)
    if out.numel():
        width = max(1, power_of_two(half))
        block = max(1, ELEMENTS // width)
        blocks = -(-len(positions) * heads // block)
        with current(x):
            rope_kernel[grid(blocks)](
                x, out, positions if rows is None else rows, positions, frequencies, len(positions), blocks, factor,
                HEADS=heads, DIM=dim, HALF=half, WIDTH=width, REST=power_of_two(dim - 2 * half), BLOCK=block,
                GATHER=rows is not None, INTERLEAVED=interleaved, SIGN=sign,
            )  # fmt: skip
    return out
