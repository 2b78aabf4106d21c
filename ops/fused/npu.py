"""The operators of a layer, each one operator of torch-npu; functions as in :mod:`mindspeed_cp.ops.fused.plain`.

npu_rms_norm and npu_swiglu take neither empty tensors nor, by their documentation, tensors that are not contiguous, in
the gradient as little as in the forward: a rank may hold no rows, and autograd gives gradients of any strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.ops.fused import plain


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight; see plain.rms_norm."""
    if not x.numel():
        return plain.rms_norm(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return x with its pairs of channels rotated; see plain.rotary_mul."""
    if not x.numel():
        return plain.rotary_mul(x, cos, sin, interleaved)
    # Layout SBND with one sequence: x [rows, 1, heads, dim], cos and sin [rows, 1, 1, dim].
    rows, cos, sin = (y.unsqueeze(1) for y in (x, cos, sin))
    return torch.ops.npu.npu_rotary_mul(rows, cos, sin, "interleave" if interleaved else "half").squeeze(1)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(a) * b of the halves of the last dimension; see plain.swiglu."""
    return _SwiGLU.apply(x) if x.numel() else plain.swiglu(x)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, rstd = torch.ops.npu.npu_rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = torch.ops.npu.npu_rms_norm_backward(dout.contiguous(), x, weight, rstd)
        return dx, dweight.to(weight.dtype), None  # fp32, whatever the weight is


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return torch.ops.npu.npu_swiglu(x, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.npu.npu_swiglu_backward(dout.contiguous(), x, -1)
