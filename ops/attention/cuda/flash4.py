"""FlashAttention 4 (the package flash-attn-4) on packed sequences: Hopper and Blackwell, without dropout and ALiBi.

Its functions for one direction are private, and their results have changed between releases, so that one release is
called. Its first call of a kind compiles for seconds; other lengths compile nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from functools import lru_cache
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import pad_head_dim
from mindspeed_cp.ops.attention.cuda.flash_attention import CudaFlashAttention, FlashArguments, FlashOperator, RngState
from mindspeed_cp.ops.attention.lowering.fused_call import FusedCall
from mindspeed_cp.ops.attention.lowering.fused_lowering import FusedCalls
from mindspeed_cp.plan import AttentionConfig

#: The package and the release whose functions are called.
PACKAGE, RELEASE = "flash-attn-4", "4.0.0b36"

#: Compute capabilities (major) that it is made for: Hopper, and Blackwell of data centres.
CAPABILITIES = (9, 10)

#: Head dimensions (of q and k, of v) that were compared with fp64; others are padded to the next pair. With 40 channels
#: the release computes a wrong dq, without a word.
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))


class Flash4Call(FusedCall):
    """A call that FlashAttention 4 computes."""


class Flash4Operator:
    """`flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd`."""

    dtypes = (torch.bfloat16, torch.float16)
    max_head_dim = 256

    def forward(self, q: Tensor, k: Tensor, v: Tensor, arguments: FlashArguments) -> tuple[Tensor, Tensor, RngState]:
        """See FlashOperator."""
        out, lse = _interface()._flash_attn_fwd(q, k, v, return_lse=True, **_keywords(arguments))[:2]
        return out, lse, ()

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        rng_state: RngState,
        arguments: FlashArguments,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See FlashOperator."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        keywords = _keywords(arguments) | {"deterministic": deterministic}
        dq, dk, dv = _interface()._flash_attn_bwd(q, k, v, out, dout, lse, **keywords)[:3]
        return dq, dk, dv


class CudaFlash4Attention(CudaFlashAttention):
    """Attention by FlashAttention 4, lowered as for FlashAttention 2.

    Args:
        name: device type of its tensors.
        operator: None: the package's; tests pass another one.
    """

    title = PACKAGE

    def __init__(self, name: str = "cuda", operator: FlashOperator | None = None) -> None:
        super().__init__(name, operator)
        self._run = Flash4Operator() if operator is None else operator

    @property
    def key(self) -> Hashable:
        """See the contract."""
        return "flash4", self.name

    def unsupported_reason(self, attention: AttentionConfig, dtype: torch.dtype) -> str | None:
        """See CudaFlashAttention; there is no dropout."""
        if attention.dropout:
            return f"attention.dropout is {attention.dropout}; valid for {self.title}: 0.0"
        return super().unsupported_reason(attention, dtype)

    def unavailable_reason(self) -> str:
        """Return why this process cannot call it; "" if it can."""
        return "" if self.operator is not None else flash_4_unavailable_reason()

    def check_device(self, device: torch.device) -> None:
        """See the contract."""
        super().check_device(device)
        if self.unavailable_reason():
            raise ConfigError(f"kernel 'flash4' of the cuda backend: {self.unavailable_reason()}; or use kernel 'auto'")

    def lower(
        self, direction: str, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> FusedCalls:
        """See the contract."""
        lowered = super().lower(direction, tiles, rows, attention, dtype)
        return {place: [Flash4Call(**vars(call)) for call in calls] for place, calls in lowered.items()}

    def _pad_head_dims(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width, width_v = next(dims for dims in HEAD_DIMS if dims[0] >= q.shape[-1] and dims[1] >= v.shape[-1])
        return pad_head_dim(q, width), pad_head_dim(k, width), pad_head_dim(v, width_v)


@lru_cache(maxsize=1)
def flash_4_unavailable_reason() -> str:
    """Return why this process cannot call FlashAttention 4, in one line; "" if it can."""
    wanted = f"install {PACKAGE}=={RELEASE}"
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed; {wanted}"
    if version != RELEASE:
        return f"{PACKAGE} is {version}, and its functions differ between releases; {wanted}"
    if not torch.cuda.is_available():
        return f"{PACKAGE} needs a GPU, and no CUDA device is visible"
    major, minor = torch.cuda.get_device_capability()
    if major not in CAPABILITIES:
        return f"{PACKAGE} needs compute capability 9 or 10 (Hopper, Blackwell); this GPU has {major}.{minor}"
    try:
        _interface()
    except Exception as error:  # a package built for another CUDA or cutlass fails in ways of its own
        return f"{PACKAGE} cannot be imported: {' '.join(str(error).split())[:160]}"
    return ""


@lru_cache(maxsize=1)
def _interface() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def _keywords(arguments: FlashArguments) -> dict[str, Any]:
    """Return what both directions take, by their names there."""
    left, right = (None if tokens < 0 else tokens for tokens in arguments.window)
    return dict(
        cu_seqlens_q=arguments.cu_seqlens_q,
        cu_seqlens_k=arguments.cu_seqlens_k,
        max_seqlen_q=arguments.max_seqlen_q,
        max_seqlen_k=arguments.max_seqlen_k,
        softmax_scale=arguments.scale,
        causal=arguments.causal,
        window_size_left=left,
        window_size_right=None if arguments.causal else right,
    )
