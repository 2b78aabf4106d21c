"""MindSpeed's norms."""

from typing import Any

import torch
from mindspeed.calls import CALLS
from torch import Tensor, nn


class PTNorm:
    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        assert config.normalization == "RMSNorm"
        return RMSNorm(hidden_size, eps, config.sequence_parallel)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, sequence_parallel: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        CALLS["norm"] += 1
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
