"""Interface of FlashAttention on packed sequences, and its binding to torch's operator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import has_triton
from mindspeed_cp.errors import ConfigError

#: State of the random numbers of a forward call, as the operator returns it.
RngState = tuple[Tensor, ...]

#: Minimum compute capability of torch's kernels.
MIN_COMPUTE_CAPABILITY = (8, 0)


@dataclass(frozen=True, eq=False)
class FlashArguments:
    """Arguments that forward and backward share.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: cumulative lengths from 0, int32 [sequences + 1], on the device.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. At least 2, and max_seqlen_k >= max_seqlen_q: torch
            ignores a window limit of max_seqlen_k or more on one side, and with max_seqlen_q 1 it groups heads, which
            requires exactly one query in each sequence.
        window: (left, right): row i of a sequence of n queries and m keys sees the keys i + (m - n) - left to
            i + (m - n) + right of it; -1 is no limit on that side.
        scale: factor of q.k.
        dropout: probability of dropping a weight.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    window: tuple[int, int]
    scale: float
    dropout: float

    @property
    def causal(self) -> bool:
        """True if the window is the causal mask."""
        return self.window == (-1, 0)


class FlashOperator(Protocol):
    """FlashAttention on packed sequences.

    Attributes:
        dtypes: supported types.
        max_head_dim: maximum head dimension; head dimensions are multiples of 8 and equal for q, k and v.
    """

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...

    @property
    def max_head_dim(self) -> int: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, arguments: FlashArguments) -> tuple[Tensor, Tensor, RngState]:
        """Return out [rows, heads, dim] of q's type, lse fp32 [heads, rows], and the state of the random numbers."""

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
        """Return dq, dk and dv of the inputs' types, from the GLOBAL out and lse [heads, rows]."""


class AtenFlashOperator:
    """torch.ops.aten._flash_attention_forward and _backward: FlashAttention 2 in torch, or the implementation that the
    program has activated with `torch.nn.attention.activate_flash_attention_impl`."""

    dtypes = (torch.bfloat16, torch.float16)
    max_head_dim = 256

    def forward(self, q: Tensor, k: Tensor, v: Tensor, arguments: FlashArguments) -> tuple[Tensor, Tensor, RngState]:
        """See the protocol."""
        left, right = arguments.window
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, arguments.cu_seqlens_q, arguments.cu_seqlens_k, arguments.max_seqlen_q, arguments.max_seqlen_k,
            arguments.dropout, arguments.causal, False, scale=arguments.scale, window_size_left=left,
        window_size_right=right, )  # fmt: skip
        return out, lse, (state, unused)

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
        """See the protocol."""
        left, right = arguments.window
        state, unused = rng_state or _empty_rng_state(q.device)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, arguments.cu_seqlens_q, arguments.cu_seqlens_k, arguments.max_seqlen_q,
            arguments.max_seqlen_k, arguments.dropout, arguments.causal, state, unused, scale=arguments.scale,
        window_size_left=left, window_size_right=right, )  # fmt: skip
        return grads


@lru_cache(maxsize=16)
def _empty_rng_state(device: torch.device) -> RngState:
    """Return a placeholder: without dropout the state is not read."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


@lru_cache(maxsize=16)
def check_device(device: torch.device) -> None:
    """Raise ConfigError if the cuda backend does not run on the device or lacks a package."""
    if device.type != "cuda":
        raise ConfigError(f"backend is 'cuda' and tensors are on {device}; valid: cuda, or backend 'cpu'")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_COMPUTE_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"backend is 'cuda' on {name} of compute capability {capability[0]}.{capability[1]}; valid: "
            f"{MIN_COMPUTE_CAPABILITY[0]}.{MIN_COMPUTE_CAPABILITY[1]} or later (A100, H100, H200), or backend 'cpu'"
        )
    if not has_triton():
        raise ConfigError("backend is 'cuda' and the package triton is not installed; install it, or use backend 'cpu'")
