"""bf16 gradients for a call in fp16 (`npu_precision: fp16`).

fp16 holds every number of bf16 between 2**-14 and 65,504 exactly, and rounds results eight times finer; gradients lie
far below. The gradient of attention is linear in that of its output, so a call gets it times a power of two, which
changes no bit of a number that stays in range, and its results are divided by the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BITS = 23  # of the fraction of fp32; the exponent is in the bits above
_BIAS = 127


def scale_gradient(dout: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of an output times a power of two, in fp16, and one over that power, fp32 without dimensions.

    The largest number becomes 2**t to 2**(t + 1), t = 8 - log2(rows * group) / 2 rounded down: sums over the rows and
    heads of a call (dk, dv), of random signs, then stay below 2**16 as long as a product with a query, key or value is
    at most 2**7 times its factors. What is larger becomes infinite, which the first check of numbers names. The host
    waits for nothing.

    Args:
        dout: bf16 [rows, heads, head_dim_v].
        group: query heads of a key head.
    """
    target = math.floor(8 - math.log2(max(1, dout.shape[0] * group)) / 2)
    largest = dout.abs().amax().float() if dout.numel() else dout.new_zeros((), dtype=torch.float32)
    exponent = (2 * _BIAS + target - (largest.view(torch.int32) >> _BITS)).clamp(1, 2 * _BIAS - 1)
    factor, inverse = ((x << _BITS).view(torch.float32) for x in (exponent, 2 * _BIAS - exponent))
    return (dout.float() * factor).half(), inverse
