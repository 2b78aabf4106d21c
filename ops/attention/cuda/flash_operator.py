"""Flash attention of packed sequences as the flash backend calls it, and its binding to torch's own operator."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import has_triton
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
        most_q, most_k: no sequence of queries, and of keys, is longer. At least 2, and most_k no less than most_q:
            torch reads a limit of most_k on one side as none, and with most_q 1 it groups heads, which wants one query
            in each sequence.
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
    """torch.ops.aten._flash_attention_forward and _backward: FlashAttention 2 of torch itself, or what the program has
    put in its place by `torch.nn.attention.activate_flash_attention_impl`. FlashAttention 3 where :func:`flash_3` has
    it, nothing is dropped and bits need not repeat. Nothing of the process is changed."""

    dtypes = (torch.bfloat16, torch.float16)
    widest = 256

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Packed) -> tuple[Tensor, Tensor, Kept]:
        """See the protocol."""
        left, right = how.window
        third = _third(q.device, how.dropout)
        if third is not None:
            out, lse = third._fa3_run_forward(
                q, k, v, how.cu_q, how.cu_k, how.most_q, how.most_k, how.scale, how.causal, left, right, None
            )
            return out, lse, ()
        out, lse, state, more, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, how.cu_q, how.cu_k, how.most_q, how.most_k, how.dropout, how.causal, False,
            scale=how.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse, (state, more)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, kept: Kept, how: Packed
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the protocol."""
        left, right = how.window
        third = _third(q.device, how.dropout)
        found: tuple[Tensor, Tensor, Tensor]
        if third is not None:
            found = third._fa3_run_backward(
                dout, q, k, v, out, lse, how.cu_q, how.cu_k, how.most_q, how.most_k, how.scale, how.causal, left, right
            )
            return found
        state, more = kept or _no_state(q.device)
        found = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, how.cu_q, how.cu_k, how.most_q, how.most_k, how.dropout, how.causal, state, more,
            scale=how.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return found


def _third(device: torch.device, dropout: float) -> Any:
    """FlashAttention 3 where it is to be taken, else None."""
    if dropout or torch.are_deterministic_algorithms_enabled():
        return None
    return flash_3(device)[0]


@lru_cache(maxsize=16)
def _no_state(device: torch.device) -> Kept:
    """Where nothing is dropped, nobody reads the state."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


@lru_cache(maxsize=16)
def check_device(device: torch.device) -> None:
    """Raise ConfigError for a device that the cuda backend does not run on, or without what its kernels need."""
    if device.type != "cuda":
        raise ConfigError(f"backend is 'cuda' and tensors are on {device}; valid: cuda, or backend 'cpu'")
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"backend is 'cuda' on {name} of compute capability {found[0]}.{found[1]}; valid: "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or later (A100, H100, H200), or backend 'cpu'"
        )
    if not has_triton():
        raise ConfigError("backend is 'cuda' and the package triton is not installed; install it, or use backend 'cpu'")


@lru_cache(maxsize=16)
def flash_3(device: torch.device) -> tuple[Any, str]:
    """Torch's own binding of FlashAttention 3, or None; and why it is not taken.

    It is taken on NVIDIA GPUs of compute capability 9 where the package is installed and can be loaded. The binding is
    a private module of torch, whose release is pinned; it is called as it is, and nothing of torch's is replaced.
    """
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return None, "made for compute capability 9"
    if importlib.util.find_spec(FLASH_3) is None:
        return None, "not installed"
    try:
        from torch.nn.attention import _fa3

        _fa3._fa3_import_module(FLASH_3)
    except Exception as error:  # a package built for another torch fails in ways of its own
        return None, f"installed, but it cannot be loaded ({' '.join(str(error).split())[:160]})"
    return _fa3, ""
