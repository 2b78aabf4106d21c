"""Attention by FlashAttention on packed sequences: one call for each kind of mask of a (step, slot), whatever the
number of documents. Without ALiBi. The operator is torch's, or another one with the same interface."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import has_triton
from mindspeed_cp.ascend_kernels.merge import merge_parts
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.accumulators import OutputAccumulator
from mindspeed_cp.ops.attention.contract import HeadGroup, Heads, pad_head_dim
from mindspeed_cp.ops.attention.lowering.device_call import DeviceCall, on_device
from mindspeed_cp.ops.attention.lowering.fused_backend import FusedBackend
from mindspeed_cp.ops.attention.lowering.fused_call import CallLimits, FusedCall
from mindspeed_cp.ops.attention.lowering.fused_lowering import FusedCalls, lower_to_fused_calls
from mindspeed_cp.plan import AttentionConfig

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


#: Limits of a call. The backward allocates memory for 128 more queries of each sequence (1 GB for 512 sequences of 32
#: heads x 128), and cumulative lengths are int32.
FLASH_LIMITS = CallLimits(share_calls=False, max_sequences=512, max_rows=2**31 - 1)

#: Head dimensions are padded to a multiple of this.
HEAD_DIM_MULTIPLE = 8


class CudaFlashAttention(FusedBackend):
    """Attention by FlashAttention. Tiles are lowered as for Ascend's fused operator, whose masks are the same: none,
    bottom-right causal, or a window counted from the bottom-right corner. Dropout uses torch.cuda.manual_seed.

    Args:
        name: device type of its tensors.
        operator: None: torch's; tests pass another one.
    """

    title = "flash attention"
    clears_unwritten_rows = False  # merge_parts ignores accumulators whose lse is -inf

    def __init__(self, name: str = "cuda", operator: FlashOperator | None = None) -> None:
        self.name = name
        self.operator = operator
        self._run: FlashOperator = AtenFlashOperator() if operator is None else operator

    @property
    def deterministic(self) -> bool:
        """True after torch.use_deterministic_algorithms(True): otherwise torch's kernels accumulate dq in any order."""
        return (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )

    @property
    def key(self) -> Hashable:
        """See the contract."""
        return "flash", self.name

    def unsupported_reason(self, attention: AttentionConfig, dtype: torch.dtype) -> str | None:
        """Return what FlashAttention does not support as setting, value and valid values; None if it supports all."""
        if attention.slopes is not None:
            return f"attention.alibi is given; valid for {self.title}: False"
        if dtype not in self._run.dtypes:
            valid = ", ".join(str(supported)[6:] for supported in self._run.dtypes)
            return f"dtype is {str(dtype)[6:]}; valid for {self.title}: {valid}"
        width = max(attention.head_dim, attention.head_dim_v)
        if width > self._run.max_head_dim:
            return f"head_dim is {width}; valid for {self.title}: up to {self._run.max_head_dim}"
        return None

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """See the contract."""
        reason = self.unsupported_reason(attention, dtype)
        if reason is not None:
            raise ConfigError(reason)

    def check_device(self, device: torch.device) -> None:
        """See the contract."""
        if self.operator is None:
            check_device(device)

    def lower(
        self, direction: str, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> FusedCalls:
        """See the contract. Both directions have the same calls, which dropout requires."""
        return lower_to_fused_calls(tiles, rows, attention, FLASH_LIMITS)

    def prepare(
        self, calls: Sequence[FusedCall], attention: AttentionConfig, heads: Heads, device: torch.device
    ) -> None:
        """See the contract: rows and cumulative lengths."""
        for call in calls:
            on_device(call, device)
            _operator_arguments(call, attention, device, attention.dropout > 0)

    @property
    def _no_rng_state(self) -> RngState:
        return ()

    def _pad_head_dims(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width = -(-max(q.shape[-1], v.shape[-1]) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
        return pad_head_dim(q, width), pad_head_dim(k, width), pad_head_dim(v, width)

    def _forward_call(
        self, call: FusedCall, attention: AttentionConfig, group: HeadGroup, qkv: tuple[Tensor, ...], dropout: bool
    ) -> tuple[Tensor, Tensor, RngState, None]:
        q, k, v = qkv
        out, lse, rng_state = self._run.forward(q, k, v, _operator_arguments(call, attention, q.device, dropout))
        return out, lse.T.contiguous(), rng_state, None

    def _backward_call(
        self, call: FusedCall, attention: AttentionConfig, group: HeadGroup, qkv: tuple[Tensor, ...],
        dout: Tensor, out: Tensor, lse: Tensor, largest: Tensor | None, rng_state: RngState, dropout: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v = qkv
        arguments = _operator_arguments(call, attention, q.device, dropout)
        return self._run.backward(
            q, k, v, dout.contiguous(), out.contiguous(), lse.T.contiguous(), rng_state, arguments
        )

    def _merge_duplicates(self, into: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> None:
        self._merge(*into, *more)

    def _merge(self, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
        merge_parts((out, lse), [part_out.contiguous()], [part_lse.contiguous()], [None], [0], (out, lse))
        return out, lse

    def _accumulate(
        self,
        call: FusedCall,
        on: DeviceCall,
        output: OutputAccumulator,
        heads: slice,
        part_out: Tensor,
        part_lse: Tensor,
    ) -> None:
        if output.has_heads(heads):
            output.merge_part(on.q_scatter.part_rows(len(output)), part_out, part_lse)
        else:
            super()._accumulate(call, on, output, heads, part_out, part_lse)


def _operator_arguments(
    call: FusedCall, attention: AttentionConfig, device: torch.device, dropout: bool
) -> FlashArguments:
    """Return the arguments of a call; built at the first use."""
    scale, dropout_p = attention.softmax_scale, attention.dropout if dropout else 0.0
    key = "flash", device, scale, dropout_p
    if key not in call.device_cache:
        cu_seqlens_q, cu_seqlens_k = (
            np.array([0, *ends], np.int32) for ends in (call.actual_seq_qlen, call.actual_seq_kvlen)
        )
        longest_q, longest_k = int(np.diff(cu_seqlens_q).max()), int(np.diff(cu_seqlens_k).max())
        call.device_cache[key] = FlashArguments(
            torch.from_numpy(cu_seqlens_q).to(device), torch.from_numpy(cu_seqlens_k).to(device),
            max(2, longest_q), max(2, longest_q, longest_k),
            flash_window(call, max(longest_q, longest_k)), scale, dropout_p,
        )  # fmt: skip
    arguments: FlashArguments = call.device_cache[key]
    return arguments


def flash_window(call: FusedCall, longest: int) -> tuple[int, int]:
    """Return (left, right) for a call in Ascend's sparse modes 0, 3 and 4; -1 where nothing is cut off in sequences of
    up to `longest` rows."""
    if call.sparse_mode == 0:
        return -1, -1
    if call.sparse_mode == 3:
        return -1, 0
    left, right = (-1 if tokens >= longest else tokens for tokens in (call.pre_tokens, call.next_tokens))
    return left, right
