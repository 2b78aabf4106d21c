"""Flash attention of packed sequences as the flash backend calls it, and its binding to torch's own operator."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.attention
from torch import Tensor

from mindspeed_cp.errors import ConfigError

#: What a forward call keeps for its backward: the state of the random numbers, as the operator gave it.
Kept = tuple[Tensor, ...]

#: The oldest compute capability of torch's kernels.
LEAST_CAPABILITY = (8, 0)

#: The module that the package of FlashAttention 3 installs.
FLASH_3 = "flash_attn_interface"


@dataclass(frozen=True, eq=False)
class Packed:
    """The arguments that forward and backward share.

    Attributes:
        cu_q, cu_k: cumulative lengths from 0, int32 [sequences + 1], on the device.
        most_q, most_k: longest sequence of queries and of keys.
        window: (left, right): row i of a sequence of n queries and m keys sees the keys i + (m - n) - left to
            i + (m - n) + right of it; -1 is no limit on that side.
        scale: factor of q.k.
        dropout: share of the weights that is dropped.
    """

    cu_q: Tensor
    cu_k: Tensor
    most_q: int
    most_k: int
    window: tuple[int, int]
    scale: float
    dropout: float

    @property
    def causal(self) -> bool:
        """Whether the window is the causal mask."""
        return self.window == (-1, 0)


class FlashOperator(Protocol):
    """Flash attention of packed sequences.

    Attributes:
        dtypes: it takes.
        widest: channels of a head at most; widths are multiples of 8, and equal for queries, keys and values.
    """

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...

    @property
    def widest(self) -> int: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Packed) -> tuple[Tensor, Tensor, Kept]:
        """out [rows, heads, width] of q's type, lse fp32 [heads, rows], and what the backward needs under dropout."""

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, kept: Kept, how: Packed
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of the inputs' types, from the GLOBAL out and lse [heads, rows]."""


class AtenFlash:
    """torch.ops.aten._flash_attention_forward and _backward: FlashAttention 2 of torch itself; FlashAttention 3 on
    GPUs of compute capability 9 where its package is installed (:func:`use_flash_3`)."""

    dtypes = (torch.bfloat16, torch.float16)
    widest = 256

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Packed) -> tuple[Tensor, Tensor, Kept]:
        """See the protocol."""
        _ready(q.device, how.dropout)
        left, right = how.window
        out, lse, state, more, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, how.cu_q, how.cu_k, how.most_q, how.most_k, how.dropout, how.causal, False,
            scale=how.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse, (state, more)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, kept: Kept, how: Packed
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the protocol."""
        _ready(q.device, how.dropout)
        left, right = how.window
        state, more = kept or _no_state(q.device)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, how.cu_q, how.cu_k, how.most_q, how.most_k, how.dropout, how.causal, state, more,
            scale=how.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return found


def _ready(device: torch.device, dropout: float) -> None:
    """Raise ConfigError where the operator cannot run; see to FlashAttention 3."""
    capability = check_device(device)
    if not dropout:
        use_flash_3(capability)
    elif active_flash() != "FA2":
        raise ConfigError(
            f"attention.dropout is {dropout}, and torch's flash attention is {active_flash()} in this process, which "
            "drops nothing; valid: 0, or torch.nn.attention.restore_flash_attention_impl() before"
        )


@lru_cache(maxsize=16)
def _no_state(device: torch.device) -> Kept:
    """Where nothing is dropped, nobody reads the state."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


@lru_cache(maxsize=16)
def check_device(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; ConfigError for one that flash attention does not run on."""
    if device.type != "cuda":
        raise ConfigError(f"flash attention is asked for on tensors of {device}; valid: cuda, or backend 'cpu'")
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"backend is 'cuda' on {name} of compute capability {found[0]}.{found[1]}; valid: "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or later (A100, H100, H200), or backend 'cpu'"
        )
    return found


@lru_cache(maxsize=16)
def use_flash_3(capability: tuple[int, int]) -> None:
    """Put FlashAttention 3 in the place of torch's kernels, for the whole process, if its package is installed, the GPU
    is one that it is made for, and nothing else was put there."""
    if capability[0] == 9 and active_flash() == "FA2" and importlib.util.find_spec(FLASH_3) is not None:
        torch.nn.attention.activate_flash_attention_impl("FA3")


def active_flash() -> str:
    """What serves aten's flash attention at this time: "FA2", torch's own, or the name of what took its place."""
    return torch.nn.attention.current_flash_attention_impl() or "FA2"
