"""The npu backend: Ascend's fused attention, with as few calls for each (step, slot) as its rules allow."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import has_triton
from mindspeed_cp.ascend_kernels.merge import merge_parts
from mindspeed_cp.device.npu_profile import check_npu_limits
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.accumulators import merge_
from mindspeed_cp.ops.attention.contract import (
    HeadGroup,
    Heads,
    check_choice,
    check_dtype,
    pad_head_dim,
    uniform_head_groups,
)
from mindspeed_cp.ops.attention.lowering.device_call import (
    DeviceCall,
    compressed_mask,
    on_device,
    ones,
    slopes_of,
)
from mindspeed_cp.ops.attention.lowering.fused_backend import FusedBackend
from mindspeed_cp.ops.attention.lowering.fused_call import CallLimits, FusedCall
from mindspeed_cp.ops.attention.lowering.fused_lowering import FusedCalls, lower_to_fused_calls, lower_to_masks
from mindspeed_cp.ops.attention.npu.fused_operator import (
    DropoutState,
    FusedArguments,
    FusedOperator,
    TorchNpuOperator,
    statistics_order,
)
from mindspeed_cp.ops.rows import put_rows
from mindspeed_cp.plan import AttentionConfig

#: Maximum amount by which a shared start may increase an ALiBi bias. fp32 rounds a bias of 2**12 by at most 2**-12,
#: a relative change of the weight that bf16 and fp16 cannot represent; fp32 needs 2**-19.
MAX_BIAS_EXCESS = {torch.float32: 2.0**5, torch.bfloat16: 2.0**12, torch.float16: 2.0**12}

#: Largest lse above the largest score of a row for which the gradient gets exp(lse - largest score): fp32 ends at 88.7.
#: Only a sink is so much larger.
MAX_LSE_EXCESS = 80.0


@dataclass(frozen=True)
class NpuAttention(FusedBackend):
    """Attention on Ascend NPUs. Dropout uses the device's generator (torch.npu.manual_seed).

    Attributes:
        lowering: "tnd": packed sequences and compressed masks; "masks": one call for each (step, slot) with a mask of
            that step's rows and keys, in layout BSND.
        alibi: "shared": squares beside the diagonal share a call by the row-shift identity; "split": one call for each
            square, with its true starts.
        merge: "fp32": :func:`mindspeed_cp.ops.attention.accumulators.merge_`; "ring_update":
            npu_ring_attention_update, which rounds to its input's type at every hop and therefore gets fp32 inputs;
            "triton": :func:`mindspeed_cp.ascend_kernels.merge_parts`, one launch, by triton-ascend.
        statistics: what the gradient gets of the softmax: "max_sum": the largest score of a row over all keys and the
            sum of the exponentials, as of one forward, but lse and 1 in rows whose sink is larger than all scores by
            more than MAX_LSE_EXCESS, where the sum would overflow; "lse": lse and 1 in all rows, the same weights with
            nothing more kept.
        key_gaps: rows of keys between those of a call: "copied": the call gets a copy without them; "skipped": they
            are sequences without queries, and nothing is copied.
        precision: "input": the operator gets rows in their own type, and rounds the result of each call to it; "fp32":
            it gets them in fp32, so that results of several calls are rounded once, after they are added up; "fp16":
            it gets rows in bf16 as fp16, and rounds the result of each call eight times finer (`scale_gradient`).
        operator: the fused operators; None: those of torch_npu.

    Raises:
        ConfigError: an option has an invalid value.
    """

    lowering: str = "tnd"
    alibi: str = "split"
    merge: str = "fp32"
    statistics: str = "max_sum"
    key_gaps: str = "copied"
    precision: str = "input"
    operator: FusedOperator | None = None

    # Without annotations: constants of the class, not options.
    name = "npu"
    title = "the npu backend"

    def __post_init__(self) -> None:
        check_choice("npu.lowering", self.lowering, ("tnd", "masks"))
        check_choice("npu.alibi", self.alibi, ("shared", "split"))
        check_choice("npu.merge", self.merge, ("fp32", "ring_update", "triton"))
        check_choice("npu.statistics", self.statistics, ("max_sum", "lse"))
        check_choice("npu.key_gaps", self.key_gaps, ("copied", "skipped"))
        check_choice("npu.precision", self.precision, ("input", "fp16", "fp32"))

    @property
    def deterministic(self) -> bool:
        """True if torch.use_deterministic_algorithms is set: otherwise the operator accumulates dq in any order.
        (torch_npu passes the setting on to CANN; the stand-in for CANN cannot show its effect.)"""
        return torch.are_deterministic_algorithms_enabled()

    @property
    def key(self) -> Hashable:
        """Name and options."""
        return self.name, self.lowering, self.alibi, self.merge, self.statistics, self.key_gaps, self.precision

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """See the contract."""
        check_dtype("the npu backend", dtype, (torch.bfloat16, torch.float16, torch.float32))
        check_npu_limits(attention, self.lowering)
        if self.precision == "fp16" and dtype != torch.bfloat16:
            raise ConfigError(
                f"npu_precision is 'fp16', which is for attention in bf16, and this one is in {str(dtype)[6:]}; valid: "
                "'input', 'fp32'; use 'input'"
            )

    def check_device(self, device: torch.device) -> None:
        """See the contract. The operator itself reports missing parts when it is loaded, before the first call."""
        if self.merge == "triton" and device.type != "cpu" and not has_triton():
            raise ConfigError(
                "npu_merge is 'triton', and the package triton-ascend is not installed; install it (docs/ascend.md), "
                "or use npu_merge 'fp32', which merges in torch"
            )

    def lower(
        self, direction: str, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> FusedCalls:
        """See the contract. Both directions have the same calls, which dropout requires."""
        # The gradient refuses bands of one key in packed sequences, so a window of (0, 0), whose ALiBi is 0, has masks.
        if self.lowering == "masks" or attention.visible_range == (0, 0):
            return lower_to_masks(tiles, rows, attention)
        limits = CallLimits(self.alibi == "shared", MAX_BIAS_EXCESS[dtype], key_gaps=self.key_gaps == "skipped")
        return lower_to_fused_calls(tiles, rows, attention, limits)

    def prepare(
        self, calls: Sequence[FusedCall], attention: AttentionConfig, heads: Heads, device: torch.device
    ) -> None:
        """See the contract: rows, masks, slopes and orders of statistics."""
        for group in uniform_head_groups(attention, heads):
            slopes_of(attention, group.q_range, device)
            for call in calls:
                if on_device(call, device).uses_compressed_mask:
                    compressed_mask(device)
                statistics_order(call, group.q.stop - group.q.start, device)

    @property
    def _operator(self) -> FusedOperator:
        return _TORCH_NPU if self.operator is None else self.operator

    @property
    def _no_rng_state(self) -> DropoutState:
        return 0, 0, 0

    def _pad_head_dims(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pad queries and keys to the width of values, as the operator requires."""
        width = max(q.shape[-1], v.shape[-1])
        return pad_head_dim(q, width), pad_head_dim(k, width), v

    def _forward_call(
        self, call: FusedCall, attention: AttentionConfig, group: HeadGroup, qkv: tuple[Tensor, ...], dropout: bool
    ) -> tuple[Tensor, Tensor, DropoutState, Tensor | None]:
        device = qkv[0].device
        arguments = _operator_arguments(call, attention, group, device, dropout)
        q, k, v = (self._operator_rows(x, call) for x in qkv)
        out, softmax_max, softmax_sum, rng_state = self._operator.forward(q, k, v, arguments)
        order = statistics_order(call, arguments.heads, device)
        largest = order.to_rows(softmax_max)
        lse = largest + order.to_rows(softmax_sum).log()
        shift = on_device(call, device).bias_shift
        if shift is not None and arguments.slopes is not None:
            lse -= shift * arguments.slopes
            largest = largest - shift * arguments.slopes
        kept = largest.contiguous() if self.statistics == "max_sum" else None
        return out.reshape(call.rows, arguments.heads, -1), lse, rng_state, kept

    def _backward_call(
        self, call: FusedCall, attention: AttentionConfig, group: HeadGroup, qkv: tuple[Tensor, ...],
        dout: Tensor, out: Tensor, lse: Tensor, largest: Tensor | None, rng_state: DropoutState, dropout: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        device = lse.device
        on = on_device(call, device)
        arguments = _operator_arguments(call, attention, group, device, dropout)
        order = statistics_order(call, arguments.heads, device)
        # softmax_max = lse and softmax_sum = 1 give the same weights exp(score - lse), also where no forward on this
        # rank has kept the largest scores.
        row_max = lse if largest is None else torch.where(lse - largest > MAX_LSE_EXCESS, lse, largest)
        shifted = row_max
        if on.bias_shift is not None and arguments.slopes is not None:
            shifted = row_max + on.bias_shift * arguments.slopes
        softmax_max = order.from_rows(shifted)
        softmax_sum = ones(softmax_max.shape, device) if largest is None else order.from_rows((lse - row_max).exp())
        if call.layout == "BSND":
            shape = 1, arguments.heads, call.rows, -1
            softmax_max, softmax_sum = softmax_max.view(shape), softmax_sum.view(shape)
        inverse = None
        if self.precision == "fp16":
            dout, inverse = scale_gradient(dout, qkv[0].shape[1] // qkv[1].shape[1])
        q, k, v, out = (self._operator_rows(x, call) for x in (*qkv, out))
        dout = _without_padding(self._operator_rows(dout, call), on)
        grads = self._operator.backward(q, k, v, dout, out, softmax_max, softmax_sum, rng_state, arguments)
        dq, dk, dv = (x.reshape(-1, *x.shape[-2:]) for x in grads)
        return (dq, dk, dv) if inverse is None else (dq.float() * inverse, dk.float() * inverse, dv.float() * inverse)

    def _operator_rows(self, x: Tensor, call: FusedCall) -> Tensor:
        """Return rows in the type that the operator gets and the layout of the call, contiguous."""
        x = x.to(_PRECISIONS.get(self.precision, x.dtype)).contiguous()
        return x if call.layout == "TND" else x[None]

    def _merge_duplicates(self, into: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> None:
        (out, lse), (part_out, part_lse) = into, more
        merge_(out, lse, part_out, part_lse)

    def _merge(self, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
        if self.merge == "ring_update":
            return self._ring_update(out, lse, part_out, part_lse)
        if self.merge == "triton":
            merge_parts((out, lse), [part_out.contiguous()], [part_lse.contiguous()], [None], [0], (out, lse))
        else:
            merge_(out, lse, part_out, part_lse)
        return out, lse

    def _ring_update(self, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge by npu_ring_attention_update, in layout SBH with batch size 1: rows are independent, and for TND public
        sources disagree on whether the list of lengths begins with 0."""
        rows, heads, _ = out.shape

        def operands(x: Tensor, x_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            softmax_max = x_lse.T.reshape(1, heads, rows, 1).expand(-1, -1, -1, 8).contiguous()
            return x.float().reshape(rows, 1, -1).contiguous(), softmax_max, ones(softmax_max.shape, softmax_max.device)

        merged, softmax_max, softmax_sum = self._operator.update(operands(out, lse), operands(part_out, part_lse))
        return merged.view(out.shape), (softmax_max[0, ..., 0] + softmax_sum[0, ..., 0].log()).T


_TORCH_NPU = TorchNpuOperator()
_PRECISIONS = {"fp16": torch.float16, "fp32": torch.float32}


def _operator_arguments(
    call: FusedCall, attention: AttentionConfig, group: HeadGroup, device: torch.device, dropout: bool
) -> FusedArguments:
    packed = call.layout == "TND"
    return FusedArguments(
        heads=group.q.stop - group.q.start,
        layout=call.layout,
        actual_seq_qlen=list(call.actual_seq_qlen) if packed else None,
        actual_seq_kvlen=list(call.actual_seq_kvlen) if packed else None,
        sparse_mode=call.sparse_mode,
        pre_tokens=call.pre_tokens,
        next_tokens=call.next_tokens,
        mask=on_device(call, device).mask(call.keys),
        slopes=slopes_of(attention, group.q_range, device),
        start_idx=call.start_idx,
        scale=attention.softmax_scale,
        keep_prob=1.0 - attention.dropout if dropout else 1.0,
    )


_BITS = 23  # of the fraction of fp32; the exponent is in the bits above
_BIAS = 127


def scale_gradient(dout: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of an output times a power of two, in fp16, and one over that power, fp32 without dimensions.

    fp16 holds every number of bf16 between 2**-14 and 65,504 exactly, and rounds results eight times finer; gradients
    lie far below. The gradient of attention is linear in that of its output, so a call gets it times a power of two,
    which changes no bit of a number that stays in range, and its results are divided by the same.

    The largest number becomes 2**t to 2**(t + 1), t = 8 - log2(rows * group) / 2 rounded down: sums over the rows and
    heads of a call (dk, dv), of random signs, then stay below 2**16 as long as a product with a query, key or value is
    at most 2**7 times its factors. What is larger becomes infinite, which the first check of numbers names. The host
    waits for nothing.

    Args:
        dout: bf16 [rows, heads, head_dim_v].
        group: query heads of a key head.
    """
    target = math.floor(8 - math.log2(max(1, dout.shape[0] * group)) / 2)
    largest = dout.abs().amax().float() if dout.numel() else dout.new_zeros((), dtype=torch.float32)
    exponent = (2 * _BIAS + target - (largest.view(torch.int32) >> _BITS)).clamp(1, 2 * _BIAS - 1)
    factor, inverse = ((x << _BITS).view(torch.float32) for x in (exponent, 2 * _BIAS - exponent))
    return (dout.float() * factor).half(), inverse


def _without_padding(dout: Tensor, on: DeviceCall) -> Tensor:
    """Clear the gradient of rows that only pad a square. (A view of the caller's gradient is copied first.)"""
    if on.padding is None:
        return dout
    dout = dout.clone() if isinstance(on.q, slice) else dout
    put_rows(dout, on.padding, 0)
    return dout
