"""What the operator tests share: random tensors, the fp64 reference of a case, and the comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp import AttentionConfig, Documents
from mindspeed_cp.ops.attention.reference import dense_packed_attention

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NAMES = ("out", "lse", "dq", "dk", "dv")


def tensors(
    rows_q: int, rows_k: int, shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    """q, k, v and dout for heads, kv heads, head_dim, head_dim_v."""
    heads, kv_heads, d, dv = shape
    g = torch.Generator().manual_seed(seed)
    sizes = ((rows_q, heads, d), (rows_k, kv_heads, d), (rows_k, kv_heads, dv), (rows_q, heads, dv))
    return [torch.randn(*s, generator=g).to(dtype) for s in sizes]


def reference(
    attention: AttentionConfig, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, documents: Documents, **more
) -> list[Tensor]:
    """out, lse, dq, dk, dv in fp64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_packed_attention(attention, *leaves, documents, **more)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def compare(got: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> None:
    """Largest error of each, relative to the largest value of the reference, or absolute where that is below 1.

    Args:
        got, want: as many of out, lse, dq, dk, dv as are compared.
    """
    assert len(got) == len(want)
    for name, a, b in zip(NAMES, got, want, strict=False):
        assert a.shape == b.shape, name
        seen = torch.isfinite(b)
        assert torch.equal(torch.isfinite(a), seen), name
        if seen.any():
            error = (a.double() - b)[seen].abs().max() / max(1.0, float(b[seen].abs().max()))
            assert error <= LIMITS[dtype], f"{name}: {error:.2e}"
