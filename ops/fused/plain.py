"""The operators of a layer in torch's own operations, on any device: what a fused operator must equal."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Args:
        x: [..., channels].
        weight: [channels], of the dtype of x.
        eps: added to the mean of the squares.
    """
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return x with each pair of channels (a, b) rotated to (a cos - b sin, b cos + a sin).

    Args:
        x: [rows, heads, dim].
        cos, sin: [rows, 1, dim], equal for the two channels of a pair, of the dtype of x.
        interleaved: pairs are neighbours (2i, 2i + 1); else channel i and i + dim / 2.
    """
    if interleaved:
        half = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
    return x * cos + half * sin


def swiglu(x: Tensor) -> Tensor:
    """Return silu(a) * b of the two halves a and b of the last dimension: [..., 2 n] -> [..., n]."""
    gate, linear = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * linear
