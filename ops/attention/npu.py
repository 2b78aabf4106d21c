"""The npu backend: Ascend's fused attention, as few calls for each (step, slot) as its rules allow."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_cp.ascend_kernels.launch import has_triton
from mindspeed_cp.ascend_kernels.merge import merge_parts_
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import BackwardState, ForwardState, Heads
from mindspeed_cp.ops.attention.heads import EvenPart, even_parts
from mindspeed_cp.ops.attention.npu_calls import Choice, FusedCall
from mindspeed_cp.ops.attention.npu_checks import check_attention, check_option
from mindspeed_cp.ops.attention.npu_lowering import Lowering, lower
from mindspeed_cp.ops.attention.npu_masks import lower_to_masks
from mindspeed_cp.ops.attention.npu_operator import FusedOperator, Masking, TorchNpu
from mindspeed_cp.ops.attention.npu_placed import (
    Index,
    Placed,
    compressed_mask,
    ones,
    order_of,
    place,
    slopes_of,
    take,
)
from mindspeed_cp.ops.attention.results import add_to, put
from mindspeed_cp.ops.merge import merge_
from mindspeed_cp.plan import AttentionConfig

#: How much larger than its true value a shared start may make an ALiBi bias: fp32 rounds a bias of 2**12 by 2**-12 at
#: most, a share of the weight that bf16 and fp16 do not hold; fp32 wants 2**-19.
EXCESS = {torch.float32: 2.0**5, torch.bfloat16: 2.0**12, torch.float16: 2.0**12}


@dataclass(frozen=True)
class NpuAttention:
    """Attention on Ascend NPUs.

    Dropped weights are drawn by the operator from the device's generator (torch.npu.manual_seed), not from the dropout
    key, which other backends use; the backward drops the same ones, and needs the tiles of its forward.

    Attributes:
        lowering: "tnd": packed sequences and compressed masks; "masks": one call for each (step, slot) with a mask of
            that step's rows and keys, for layouts without packed sequences.
        alibi: "shared": squares beside the diagonal share a call, with the row-shift identity; "split": a call for each
            square, with its true starts.
        merge: "fp32": :func:`mindspeed_cp.ops.merge.merge_`; "ring_update": npu_ring_attention_update, which rounds to
            its input's type at every hop, and so is given the accumulators and the part in fp32; "triton": this
            project's kernel (:func:`mindspeed_cp.ascend_kernels.merge_parts_`), one launch, by triton-ascend.
        operator: the fused operators; None: those of torch_npu.

    Raises:
        ConfigError: an option has no such value.
    """

    lowering: str = "tnd"
    alibi: str = "shared"
    merge: str = "fp32"
    operator: FusedOperator | None = None

    # Without annotations: constants of the class, not options.
    name = "npu"

    def __post_init__(self) -> None:
        check_option("lowering", self.lowering, ("tnd", "masks"))
        check_option("alibi", self.alibi, ("shared", "split"))
        check_option("merge", self.merge, ("fp32", "ring_update", "triton"))

    @property
    def deterministic(self) -> bool:
        """The operator's gradient adds up dq in any order, unless torch.use_deterministic_algorithms tells it not to
        (torch_npu hands that on to CANN; the stand-in cannot show what CANN does with it)."""
        return torch.are_deterministic_algorithms_enabled()

    @property
    def key(self) -> Hashable:
        """Name and options."""
        return self.name, self.lowering, self.alibi, self.merge

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """See the contract."""
        check_attention(attention, dtype, self.lowering)

    def check_device(self, device: torch.device) -> None:
        """See the contract: the operator says what it lacks when it is loaded, before the first call."""
        if self.merge == "triton" and device.type != "cpu" and not has_triton():
            raise ConfigError(
                "npu_merge is 'triton', and the package triton-ascend is not installed; install it (docs/kernels.md), "
                "or give fp32, which merges in torch"
            )

    def lower_forward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype) -> Lowering:
        """See the contract."""
        if self.lowering == "masks":
            return lower_to_masks(tiles, rows, attention)
        return lower(tiles, rows, attention, Choice(self.alibi == "shared", EXCESS[dtype]))

    def lower_backward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype) -> Lowering:
        """See the contract. The same calls as in the forward: under dropout they have to be."""
        return self.lower_forward(tiles, rows, attention, dtype)

    def place(self, calls: Sequence[FusedCall], attention: AttentionConfig, heads: Heads, device: torch.device) -> None:
        """See the contract: rows, masks, slopes and orders of statistics."""
        for part in even_parts(attention, heads):
            slopes_of(attention, part.numbers, device)
            for call in calls:
                if place(call, device).compressed:
                    compressed_mask(device)
                order_of(call, part.q.stop - part.q.start, device)

    def forward(
        self, calls: Sequence[FusedCall], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See the contract."""
        wide_q, k = _wide(state.q, v), _wide(k, v)
        for part in even_parts(attention, state.heads):
            q, out, lse = (x[:, part.q] for x in (wide_q, state.out, state.lse))
            kk, vv = k[:, part.kv], v[:, part.kv]
            for call in calls:
                placed, how = place(call, q.device), _how(call, attention, part, q, state.dropout is not None)
                given_k, given_v = _handed(kk, placed.k, call), _handed(vv, placed.k, call)
                some, most, total, kept = self._operator.forward(_handed(q, placed.q, call), given_k, given_v, how)
                if state.dropout is not None:
                    state.kept[call.identity, part.first] = kept
                order = order_of(call, how.heads, q.device)
                some_lse = order.read(most) + order.read(total).log()
                if placed.shift is not None and how.slopes is not None:
                    some_lse -= placed.shift * how.slopes
                some = some.reshape(call.rows, how.heads, -1)
                if placed.q_back.folds:
                    some = some.float()
                some, some_lse = placed.q_back.fold((some, some_lse), lambda into, more: merge_(*into, *more))
                self._add(call, placed, out, lse, some, some_lse)

    def backward(
        self,
        calls: Sequence[FusedCall],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """See the contract."""
        width = k.shape[-1]
        wide_q, k = _wide(state.q, v), _wide(k, v)
        for part in even_parts(attention, state.heads):
            q, out, lse, dout, dq = (x[:, part.q] for x in (wide_q, state.out, state.lse, state.dout, state.dq))
            kk, vv, part_dk, part_dv = (x[:, part.kv] for x in (k, v, dk, dv))
            for call in calls:
                placed, how = place(call, q.device), _how(call, attention, part, q, state.dropout is not None)
                most = take(lse, placed.q)
                if placed.shift is not None and how.slopes is not None:
                    most = most + placed.shift * how.slopes
                most = order_of(call, how.heads, q.device).write(most)
                if call.layout == "BSND":
                    most = most.view(1, how.heads, call.rows, -1)
                given_q, given_out = _handed(q, placed.q, call), _handed(out, placed.q, call)
                given_dout = _without_padding(_handed(dout, placed.q, call), placed)
                given_k, given_v = _handed(kk, placed.k, call), _handed(vv, placed.k, call)
                kept = _kept(state, call, part)
                found = self._operator.backward(
                    given_q, given_k, given_v, given_dout, given_out, most, ones(most.shape, most.device), kept, how
                )
                some_dq, some_dk, some_dv = (x.reshape(-1, *x.shape[-2:]) for x in found)
                some_dq, some_dk = some_dq[..., :width], some_dk[..., :width]
                add_to((dq,), placed.q_back, (some_dq,))
                add_to((part_dk, part_dv), placed.k_back, (some_dk, some_dv))

    @property
    def _operator(self) -> FusedOperator:
        return _TORCH_NPU if self.operator is None else self.operator

    def _add(self, call: FusedCall, placed: Placed, out: Tensor, lse: Tensor, some: Tensor, some_lse: Tensor) -> None:
        """Store or merge a call's result."""
        target = placed.q_back.target
        if call.fresh is True:
            put(out, target, some.to(out.dtype))
            put(lse, target, some_lse)
            return
        if placed.fresh is not None:
            put(out, placed.fresh, 0)
        so_far, so_far_lse = take(out, target), take(lse, target)
        if self.merge == "fp32":
            merge_(so_far, so_far_lse, some, some_lse)
        elif self.merge == "triton":
            merge_parts_(so_far, so_far_lse, some.contiguous()[None], some_lse.contiguous()[None])
        else:
            so_far, so_far_lse = self._updated(so_far, so_far_lse, some, some_lse)
        if self.merge == "ring_update" or isinstance(target, Tensor):
            put(out, target, so_far)
            put(lse, target, so_far_lse)

    def _updated(self, out: Tensor, lse: Tensor, some: Tensor, some_lse: Tensor) -> tuple[Tensor, Tensor]:
        """The vendor's merge. In layout SBH with one batch, whatever the sequences: rows are independent, and in TND
        public sources disagree whether the list of lengths begins with 0."""
        rows, heads, _ = out.shape

        def given(x: Tensor, statistic: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            most = statistic.T.reshape(1, heads, rows, 1).expand(-1, -1, -1, 8).contiguous()
            return x.to(torch.float32).reshape(rows, 1, -1).contiguous(), most, ones(most.shape, most.device)

        found, most, total = self._operator.update(given(out, lse), given(some, some_lse))
        return found.view(out.shape), (most[0, ..., 0] + total[0, ..., 0].log()).T


_TORCH_NPU = TorchNpu()


def _how(call: FusedCall, attention: AttentionConfig, part: EvenPart, q: Tensor, drops: bool) -> Masking:
    packed = call.layout == "TND"
    return Masking(
        heads=q.shape[1],
        layout=call.layout,
        cu_q=call.cu_q if packed else None,
        cu_k=call.cu_k if packed else None,
        sparse_mode=call.sparse_mode,
        pre=call.pre,
        next=call.next,
        mask=place(call, q.device).mask(call.keys),
        slopes=slopes_of(attention, part.numbers, q.device),
        starts=call.starts,
        scale=attention.softmax_scale,
        keep_prob=1.0 - attention.dropout if drops else 1.0,
    )


def _wide(x: Tensor, v: Tensor) -> Tensor:
    """Queries or keys at least as wide as values, as the operator wants them: new channels are zero and change no
    score."""
    missing = v.shape[-1] - x.shape[-1]
    return pad(x, (0, missing)) if missing > 0 else x


def _handed(x: Tensor, rows: Index, call: FusedCall) -> Tensor:
    """Rows as the operator wants them."""
    some = take(x, rows).contiguous()
    return some if call.layout == "TND" else some.unsqueeze(0)


def _without_padding(dout: Tensor, placed: Placed) -> Tensor:
    """No gradient comes from rows that only fill up a square."""
    if placed.padding is None:
        return dout
    dout = dout.clone() if isinstance(placed.q, slice) else dout
    put(dout, placed.padding, 0)
    return dout


def _kept(state: BackwardState, call: FusedCall, part: EvenPart) -> tuple[int, int, int]:
    """What the forward kept of the call.

    Raises:
        ConfigError: there was no such call.
    """
    if state.dropout is None:
        return 0, 0, 0
    if (call.identity, part.first) not in state.kept:
        raise ConfigError(
            "attention.dropout is above 0 and the backward has a call that the forward had not, so that it cannot drop "
            "the same weights; valid for the npu backend: plans with the same tiles in both directions, or dropout 0.0"
        )
    return state.kept[call.identity, part.first]
