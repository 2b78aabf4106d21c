"""The cuda backend: flash attention where it does what is asked, this project's kernel for tiles elsewhere."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import AttentionBackend, BackwardState, ForwardState, Heads, Lowered
from mindspeed_cp.ops.attention.flash import FlashAttention
from mindspeed_cp.ops.attention.flash_operator import FlashOperator
from mindspeed_cp.ops.attention.tiles import TileAttention, TileCall
from mindspeed_cp.plan import AttentionConfig

KERNELS = ("auto", "flash", "tiles")


@dataclass(frozen=True)
class CudaAttention:
    """Attention on NVIDIA GPUs of compute capability 8.0 and later.

    Attributes:
        kernel: "flash": aten's flash attention of packed sequences; "tiles": `mindspeed_cp.ascend_kernels`, which also
            computes ALiBi, fp32 and any width, and the same bits every time; "auto": flash where it does what is asked.
        operator: flash attention; None: torch's.

    Raises:
        ConfigError: no such kernel.
    """

    kernel: str = "auto"
    operator: FlashOperator | None = None
    _flash: FlashAttention = field(init=False, repr=False, compare=False)
    _tiles: TileAttention = field(init=False, repr=False, compare=False)

    # Without an annotation: a constant of the class, not an option.
    name = "cuda"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ConfigError(f"cuda.kernel is {self.kernel!r}; valid: {', '.join(KERNELS)}")
        object.__setattr__(self, "_flash", FlashAttention(self.name, self.operator))
        object.__setattr__(self, "_tiles", TileAttention(self.name))

    @property
    def deterministic(self) -> bool:
        """Where any kernel that may run is not, this is not."""
        return self.kernel == "tiles" or self._flash.deterministic

    @property
    def key(self) -> Hashable:
        """Name and options."""
        return self.name, self.kernel

    def kernel_for(self, attention: AttentionConfig, dtype: torch.dtype) -> str:
        """ "flash" or "tiles": which one computes this."""
        if self.kernel != "auto":
            return self.kernel
        return "flash" if self._flash.refuses(attention, dtype) is None else "tiles"

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """See the contract. Dropout wants flash attention."""
        wrong = self._flash.refuses(attention, dtype)
        if self.kernel == "flash" and wrong is not None:
            raise ConfigError(f"{wrong}, or kernel 'auto' of the cuda backend")
        if self.kernel_for(attention, dtype) == "tiles":
            if attention.dropout and wrong is not None:
                raise ConfigError(f"{wrong}, since attention.dropout is {attention.dropout}; or dropout 0.0")
            self._tiles.check(attention, dtype)

    def check_device(self, device: torch.device) -> None:
        """See the contract: both kernels want the same."""
        self._flash.check_device(device)

    def lower_forward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype) -> Lowered:
        """See the contract."""
        return self._one(self.kernel_for(attention, dtype)).lower_forward(tiles, rows, attention, dtype)

    def lower_backward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype) -> Lowered:
        """See the contract."""
        return self._one(self.kernel_for(attention, dtype)).lower_backward(tiles, rows, attention, dtype)

    def place(self, calls: Sequence[Any], attention: AttentionConfig, heads: Heads, device: torch.device) -> None:
        """See the contract."""
        self._of(calls).place(calls, attention, heads, device)

    def forward(
        self, calls: Sequence[Any], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See the contract."""
        self._of(calls).forward(calls, attention, state, k, v)

    def backward(
        self,
        calls: Sequence[Any],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """See the contract."""
        self._of(calls).backward(calls, attention, state, k, v, dk, dv)

    def _one(self, kernel: str) -> AttentionBackend:
        return self._tiles if kernel == "tiles" else self._flash

    def _of(self, calls: Sequence[Any]) -> AttentionBackend:
        """Whose calls these are."""
        return self._one("tiles" if calls and isinstance(calls[0], TileCall) else "flash")
