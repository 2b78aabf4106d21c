"""MindSpeed's swiglu."""

from typing import Any

import torch
from mindspeed.calls import CALLS
from torch import Tensor


class SwiGLUFunction:
    @staticmethod
    def apply(x: Tensor, *args: Any) -> Tensor:
        CALLS["swiglu"] += 1
        gate, value = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * value


class BiasSwiGLUFunction:
    @staticmethod
    def apply(x: Tensor, bias: Tensor, *args: Any) -> Tensor:
        return SwiGLUFunction.apply(x + bias)
