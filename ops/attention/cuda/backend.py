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
from mindspeed_cp.ops.attention.cuda.flash_attention import CudaFlashAttention, FlashOperator
from mindspeed_cp.ops.attention.cuda.tile_attention import CudaTileAttention, StepTiles
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import count_pairs

# The kernel that computes a rank's tiles in the least time, by measured times.


def _of_one_h200(
    rows: int, keys: int, tiles: tuple[float, float], flash4: float | tuple[float, float]
) -> list[KernelTime]:
    """Return times relative to FlashAttention 2, forward and backward."""
    times = {"flash": (1.0, 1.0), "tiles": tiles, "flash4": flash4 if isinstance(flash4, tuple) else (flash4, flash4)}
    return [
        KernelTime(kernel=kernel, rows=rows, keys=keys, forward=forward, backward=backward)  # type: ignore[arg-type]  # a name
        for kernel, (forward, backward) in times.items()
    ]


#: One NVIDIA H200, bf16, heads of 128 channels: times of the engine's calls, with copies and merges, relative to those
#: with FlashAttention 2. The first five: plans of 8 ranks for a row of 73 documents (64K tokens), by the mean tile:
#: ring, all_gather, hybrid, hierarchical, ulysses; only the sum of both directions was measured. The last two:
#: 8 x 8K and one document of 64K. `mindspeed-cp calibrate --device cuda` measures those of another device.
H200_TIMES = (
    *_of_one_h200(56, 84, (0.64, 0.64), 0.90),
    *_of_one_h200(56, 450, (0.53, 0.53), 0.46),
    *_of_one_h200(225, 340, (0.76, 0.76), 0.63),
    *_of_one_h200(450, 450, (0.90, 0.90), 0.53),
    *_of_one_h200(900, 900, (0.76, 0.76), 0.54),
    *_of_one_h200(8192, 8192, (1.27, 1.03), (0.50, 0.47)),
    *_of_one_h200(65536, 65536, (1.09, 0.94), (0.44, 0.45)),
)


def fastest_kernel(
    tiles: np.ndarray, attention: AttentionConfig, direction: str, kernels: Sequence[str], times: Sequence[KernelTime]
) -> str:
    """Return the kernel that takes the least time for a rank's tiles of one direction.

    The time of a tile is its visible pairs times the time per pair of the measured size that is nearest to it: by the
    ratio of rows times the ratio of keys. Sizes at which not all kernels were measured are left out.

    Args:
        tiles: records of dtype TILE.
        attention: configuration of the layer.
        direction: "forward" or "backward".
        kernels: kernels that support the attention, the first of which is returned without tiles, or without a size at
            which all were measured.
        times: measured times.
    """
    measured: dict[tuple[float, float], dict[str, float]] = {}
    for time in times:
        measured.setdefault((time.rows, time.keys), {})[time.kernel] = getattr(time, direction)
    sizes = [size for size, of_kernels in measured.items() if all(kernel in of_kernels for kernel in kernels)]
    if len(kernels) == 1 or not len(tiles) or not sizes:
        return kernels[0]
    rows = np.log([tiles["q_rows"], tiles["k_rows"]])  # [2, tiles]
    distance = np.abs(rows[:, :, None] - np.log(sizes).T[:, None, :]).sum(0)  # [tiles, sizes]
    pairs = np.bincount(distance.argmin(1), weights=count_pairs(tiles, attention), minlength=len(sizes))
    seconds = [pairs @ np.array([measured[size][kernel] for size in sizes]) for kernel in kernels]
    return kernels[int(np.argmin(seconds))]


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
