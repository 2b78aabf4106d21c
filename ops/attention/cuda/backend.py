"""The cuda backend: FlashAttention where it supports the attention, this project's tile kernel elsewhere."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator
from mindspeed_cp.ops.attention.contract import (
    AttentionBackend,
    BackwardState,
    ForwardState,
    Heads,
    LoweredCalls,
    check_choice,
)
from mindspeed_cp.ops.attention.cuda.flash_attention import CudaFlashAttention
from mindspeed_cp.ops.attention.cuda.flash_operator import FlashOperator
from mindspeed_cp.ops.attention.cuda.tile_attention import CudaTileAttention, StepTiles
from mindspeed_cp.plan import AttentionConfig

KERNELS = ("auto", "flash", "tiles")


@dataclass(frozen=True)
class CudaAttention:
    """Attention on NVIDIA GPUs of compute capability 8.0 and later.

    Attributes:
        kernel: "flash": torch's FlashAttention on packed sequences; "tiles": `mindspeed_cp.ascend_kernels`, which also
            supports ALiBi, fp32 and any head dimension, and is deterministic; "auto": "flash" where it is supported.
        operator: FlashAttention; None: torch's.

    Raises:
        ConfigError: unknown kernel.
    """

    kernel: str = "auto"
    operator: FlashOperator | None = None
    _flash: CudaFlashAttention = field(init=False, repr=False, compare=False)
    _tiles: CudaTileAttention = field(init=False, repr=False, compare=False)

    # Without an annotation: a constant of the class, not an option.
    name = "cuda"

    def __post_init__(self) -> None:
        check_choice("cuda.kernel", self.kernel, KERNELS)
        object.__setattr__(self, "_flash", CudaFlashAttention(self.name, self.operator))
        object.__setattr__(self, "_tiles", CudaTileAttention(self.name))

    @property
    def deterministic(self) -> bool:
        """True if every kernel that may run is deterministic."""
        return self.kernel == "tiles" or self._flash.deterministic

    @property
    def key(self) -> Hashable:
        """Name and options."""
        return self.name, self.kernel

    def kernel_for(self, attention: AttentionConfig, dtype: torch.dtype) -> str:
        """Return the kernel for this attention: "flash" or "tiles"."""
        if self.kernel != "auto":
            return self.kernel
        return "flash" if self._flash.unsupported_reason(attention, dtype) is None else "tiles"

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """See the contract. Dropout requires FlashAttention."""
        reason = self._flash.unsupported_reason(attention, dtype)
        if self.kernel == "flash" and reason is not None:
            raise ConfigError(f"{reason}, or kernel 'auto' of the cuda backend")
        if self.kernel_for(attention, dtype) == "tiles":
            if attention.dropout and reason is not None:
                raise ConfigError(f"{reason}, since attention.dropout is {attention.dropout}; or dropout 0.0")
            self._tiles.check(attention, dtype)

    def check_device(self, device: torch.device) -> None:
        """See the contract: both kernels have the same requirements."""
        self._flash.check_device(device)

    def lower_forward(
        self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> LoweredCalls:
        """See the contract."""
        return self._backend_for_kernel(self.kernel_for(attention, dtype)).lower_forward(tiles, rows, attention, dtype)

    def lower_backward(
        self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> LoweredCalls:
        """See the contract."""
        return self._backend_for_kernel(self.kernel_for(attention, dtype)).lower_backward(tiles, rows, attention, dtype)

    def prepare(self, calls: Sequence[Any], attention: AttentionConfig, heads: Heads, device: torch.device) -> None:
        """See the contract."""
        self._backend_of_calls(calls).prepare(calls, attention, heads, device)

    def forward(
        self, calls: Sequence[Any], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See the contract."""
        self._backend_of_calls(calls).forward(calls, attention, state, k, v)

    def backward(
        self,
        calls: Sequence[Any],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: GradientAccumulator,
        dv: GradientAccumulator,
    ) -> None:
        """See the contract."""
        self._backend_of_calls(calls).backward(calls, attention, state, k, v, dk, dv)

    def _backend_for_kernel(self, kernel: str) -> AttentionBackend:
        return self._tiles if kernel == "tiles" else self._flash

    def _backend_of_calls(self, calls: Sequence[Any]) -> AttentionBackend:
        return self._backend_for_kernel("tiles" if calls and isinstance(calls[0], StepTiles) else "flash")
