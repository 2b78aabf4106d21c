"""Rotates as aclnnRotaryPositionEmbedding does, which takes four dimensions and no empty tensor."""

import torch
from mindspeed.calls import CALLS
from torch import Tensor


def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """x [s, b, heads, dim], cos and sin [s, 1, 1, dim]; mode 0: halves, 1: interleaved."""
    assert x.dim() == 4 and x.is_contiguous() and x.numel(), f"the operator takes no x of shape {list(x.shape)}"
    assert list(cos.shape) == list(sin.shape) == [len(x), 1, 1, x.shape[-1]]
    assert x.dtype == cos.dtype == sin.dtype and mode in (0, 1)
    CALLS["rotary"] += 1
    if mode:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return x * cos + turned * sin
