"""The cuda backend: FlashAttention 4 or 2, or this project's tile kernel, whichever takes the least time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.cluster import KernelTime
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
from mindspeed_cp.ops.attention.cuda.flash4 import CudaFlash4Attention, Flash4Call
from mindspeed_cp.ops.attention.cuda.flash_attention import CudaFlashAttention
from mindspeed_cp.ops.attention.cuda.flash_operator import FlashOperator
from mindspeed_cp.ops.attention.cuda.kernel_choice import H200_TIMES, fastest_kernel
from mindspeed_cp.ops.attention.cuda.tile_attention import CudaTileAttention, StepTiles
from mindspeed_cp.plan import AttentionConfig

KERNELS = ("auto", "flash4", "flash", "tiles")


@dataclass(frozen=True)
class CudaAttention:
    """Attention on NVIDIA GPUs of compute capability 8.0 and later.

    Attributes:
        kernel: "flash4": the package flash-attn-4; "flash": torch's FlashAttention on packed sequences; "tiles":
            `mindspeed_cp.ascend_kernels`, which also supports ALiBi, fp32 and any head dimension, and is deterministic;
            "auto": for each rank and direction the fastest by `kernel_times` of those that support the attention, or
            `operator` where one is given.
        operator: FlashAttention in the place of torch's, or of that of flash-attn-4; None: theirs.
        kernel_times: measured times; empty: those of one H200.

    Raises:
        ConfigError: unknown kernel.
    """

    kernel: str = "auto"
    operator: FlashOperator | None = None
    kernel_times: tuple[KernelTime, ...] = ()
    _flash4: CudaFlash4Attention = field(init=False, repr=False, compare=False)
    _flash: CudaFlashAttention = field(init=False, repr=False, compare=False)
    _tiles: CudaTileAttention = field(init=False, repr=False, compare=False)

    # Without an annotation: a constant of the class, not an option.
    name = "cuda"

    def __post_init__(self) -> None:
        check_choice("cuda.kernel", self.kernel, KERNELS)
        object.__setattr__(self, "_flash4", CudaFlash4Attention(self.name, self.operator))
        object.__setattr__(self, "_flash", CudaFlashAttention(self.name, self.operator))
        object.__setattr__(self, "_tiles", CudaTileAttention(self.name))

    @property
    def deterministic(self) -> bool:
        """True if every kernel that may run is deterministic."""
        return self.kernel == "tiles" or self._flash.deterministic

    @property
    def key(self) -> Hashable:
        """Name and options."""
        return self.name, self.kernel, self.kernel_times

    def kernels_for(self, attention: AttentionConfig, dtype: torch.dtype) -> tuple[str, ...]:
        """Return the kernels that may compute this attention."""
        if self.kernel != "auto":
            return (self.kernel,)
        if self._flash.unsupported_reason(attention, dtype) is not None:
            return ("tiles",)
        if attention.dropout or self.operator is not None:
            return ("flash",)
        has_flash4 = self._flash4.unsupported_reason(attention, dtype) is None and not self._flash4.unavailable_reason()
        return ("flash4", "flash", "tiles") if has_flash4 else ("flash", "tiles")

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """See the contract. Dropout requires FlashAttention 2."""
        if self.kernel in ("flash", "flash4"):
            reason = (self._flash if self.kernel == "flash" else self._flash4).unsupported_reason(attention, dtype)
            if reason is not None:
                raise ConfigError(f"{reason}, or kernel 'auto' of the cuda backend")
        elif self.kernels_for(attention, dtype) == ("tiles",):
            reason = self._flash.unsupported_reason(attention, dtype)
            if self.kernel == "auto" and attention.dropout and reason is not None:
                raise ConfigError(f"{reason}, since attention.dropout is {attention.dropout}; or dropout 0.0")
            self._tiles.check(attention, dtype)

    def check_device(self, device: torch.device) -> None:
        """See the contract: kernels have the same requirements, but for flash-attn-4."""
        (self._flash4 if self.kernel == "flash4" else self._flash).check_device(device)

    def lower(
        self, direction: str, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> LoweredCalls:
        """See the contract."""
        kernels = self.kernels_for(attention, dtype)
        kernel = fastest_kernel(tiles, attention, direction, kernels, self.kernel_times or H200_TIMES)
        return self._backend(kernel).lower(direction, tiles, rows, attention, dtype)

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

    def _backend_of_calls(self, calls: Sequence[Any]) -> AttentionBackend:
        first = calls[0] if calls else None
        return self._backend(
            "tiles" if isinstance(first, StepTiles) else "flash4" if isinstance(first, Flash4Call) else "flash"
        )

    def _backend(self, kernel: str) -> AttentionBackend:
        backends: dict[str, AttentionBackend] = {"flash4": self._flash4, "flash": self._flash, "tiles": self._tiles}
        return backends[kernel]
