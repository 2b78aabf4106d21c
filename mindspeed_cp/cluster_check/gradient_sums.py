"""Two sums that the gradients of all keys and values must satisfy, whatever the algorithm and the number of ranks.

Attention is linear in v, so <dout, out> = <v, dv>. Its scores are linear in q and in k, so <q, dq> = <k, dk>. A
gradient that is lost or added twice on its way to its owner breaks one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Largest difference of two sums of products that must be equal, relative to the root of the sum of the squares of the
#: products. With an eighth of the rows lost it was 0.03 to 0.15, with rounding alone at most 6e-7 in fp32, 3e-4 in fp16
#: and 5e-3 in bf16 (tests/cluster_check/test_gradient_sums.py, on a CPU).
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def gradient_sums(
    inputs: Sequence[Tensor], out: Tensor, dout: Tensor, gradients: Sequence[Tensor | None]
) -> tuple[float, ...]:
    """Return the sum of the products, and of their squares, of (dout, out), (v, dv), (q, dq) and (k, dk).

    Args:
        inputs: q, k and v of a rank.
        out, dout: output and its gradient.
        gradients: dq, dk and dv; None counts as 0.
    """
    (q, k, v), (dq, dk, dv) = inputs, gradients
    pairs = ((dout, out), (v, dv), (q, dq), (k, dk))
    return tuple(number for x, y in pairs for number in _sums(x, y))


def wrong_sums(totals: Sequence[float], dtype: torch.dtype) -> str | None:
    """Return what is wrong, given the totals of :func:`gradient_sums` over all ranks; None if nothing is."""
    for name, difference in zip(("values", "keys"), differences(totals), strict=True):
        if not difference <= TOLERANCE[dtype]:
            return (
                f"the gradients of all {name} are wrong in sum by {difference:.1e} of their size; rounding of "
                f"{str(dtype)[6:]} explains {TOLERANCE[dtype]:.1e}"
            )
    return None


def differences(totals: Sequence[float]) -> tuple[float, float]:
    """Return the relative difference of the sums of values, and of keys."""
    values, keys = (abs(totals[i] - totals[i + 2]) / max(totals[i + 1], totals[i + 3], 1e-60) ** 0.5 for i in (0, 4))
    return values, keys


def _sums(x: Tensor, y: Tensor | None) -> tuple[float, float]:
    """Return the sum of the products of two tensors, element by element, and that of their squares, in fp64."""
    if y is None:
        return 0.0, 0.0
    products = x.detach().cpu().double() * y.detach().cpu().double()
    return float(products.sum()), float(products.square().sum())
