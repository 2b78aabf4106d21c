"""A backend on flash attention of packed sequences: one call for each kind of mask of a (step, slot), whatever the
documents. Without ALiBi."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_cp.ascend_kernels.merge import merge_parts_
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import BackwardState, ForwardState, Heads
from mindspeed_cp.ops.attention.flash_operator import AtenFlash, FlashOperator, Kept, Packed, check_device
from mindspeed_cp.ops.attention.heads import EvenPart, even_parts, put_back, whole
from mindspeed_cp.ops.attention.npu_calls import Choice, FusedCall
from mindspeed_cp.ops.attention.npu_lowering import Lowering, lower
from mindspeed_cp.ops.attention.npu_placed import Placed, place, take
from mindspeed_cp.ops.attention.results import add_to, put
from mindspeed_cp.plan import AttentionConfig

#: Sequences of a call at most (the backward takes memory for 128 more queries of each: 1 GB for 512 of 32 heads of 128
#: channels), and rows (cumulative lengths are int32).
LIMITS = Choice(share=False, sequences=512, rows=2**31 - 1)

#: Channels of a head are filled up to a multiple of this.
CHANNELS = 8


class FlashAttention:
    """Attention by flash attention of packed sequences, tiles lowered as for Ascend's fused operator, whose masks are
    the same: none, bottom-right causal, or a window counted from the bottom-right corner.

    Dropped weights are drawn by the operator from the device's generator (torch.cuda.manual_seed), not from the dropout
    key; the backward drops the same ones, and needs the tiles of its forward.

    Args:
        name: kind of device whose tensors it takes.
        operator: of torch; another one in tests.
    """

    def __init__(self, name: str = "cuda", operator: FlashOperator | None = None) -> None:
        self.name = name
        self.operator = operator
        self._run: FlashOperator = AtenFlash() if operator is None else operator

    @property
    def deterministic(self) -> bool:
        """Torch's kernels add up dq in any order, unless torch.use_deterministic_algorithms(True) was called."""
        return (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )

    @property
    def key(self) -> Hashable:
        """See the contract."""
        return "flash", self.name

    def refuses(self, attention: AttentionConfig, dtype: torch.dtype) -> str | None:
        """What flash attention does not do, as setting, value and valid values; None: it does it."""
        if attention.slopes is not None:
            return "attention.alibi is given; valid for flash attention: False"
        if dtype not in self._run.dtypes:
            valid = ", ".join(str(one)[6:] for one in self._run.dtypes)
            return f"dtype is {str(dtype)[6:]}; valid for flash attention: {valid}"
        width = max(attention.head_dim, attention.head_dim_v)
        if width > self._run.widest:
            return f"head_dim is {width}; valid for flash attention: up to {self._run.widest}"
        return None

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """See the contract."""
        wrong = self.refuses(attention, dtype)
        if wrong is not None:
            raise ConfigError(wrong)

    def check_device(self, device: torch.device) -> None:
        """See the contract."""
        if self.operator is None:
            check_device(device)

    def lower_forward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype) -> Lowering:
        """See the contract."""
        return lower(tiles, rows, attention, LIMITS)

    def lower_backward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype) -> Lowering:
        """See the contract. The same calls as in the forward: under dropout they have to be."""
        return self.lower_forward(tiles, rows, attention, dtype)

    def place(self, calls: Sequence[FusedCall], attention: AttentionConfig, heads: Heads, device: torch.device) -> None:
        """See the contract: rows and cumulative lengths."""
        for call in calls:
            place(call, device)
            _how(call, attention, device, attention.dropout > 0)

    def forward(
        self, calls: Sequence[FusedCall], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See the contract."""
        width_v = v.shape[-1]
        wide_q, wide_k, wide_v = _wide(state.q, k, v)
        for part in even_parts(attention, state.heads):
            q, out, lse = wide_q[:, part.q], whole(state.out, part.q), whole(state.lse, part.q)
            kk, vv = wide_k[:, part.kv], wide_v[:, part.kv]
            for call in calls:
                placed, how = place(call, q.device), _how(call, attention, q.device, state.dropout is not None)
                some, some_lse, kept = self._run.forward(take(q, placed.q), take(kk, placed.k), take(vv, placed.k), how)
                if state.dropout is not None:
                    state.kept[call.identity, part.first] = kept
                some, some_lse = some[..., :width_v], some_lse.T.contiguous()
                if placed.q_back.folds:
                    some = some.float().contiguous()
                some, some_lse = placed.q_back.fold((some, some_lse), _join)
                _add(call, placed, out, lse, some, some_lse)
            put_back(state.out, part.q, out)
            put_back(state.lse, part.q, lse)

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
        width, width_v = k.shape[-1], v.shape[-1]
        wide_q, wide_k, wide_v = _wide(state.q, k, v)
        wide_out, wide_dout = (_padded(x, wide_v.shape[-1]) for x in (state.out, state.dout))
        for part in even_parts(attention, state.heads):
            q, out, lse, dout, dq = (x[:, part.q] for x in (wide_q, wide_out, state.lse, wide_dout, state.dq))
            kk, vv, part_dk, part_dv = (x[:, part.kv] for x in (wide_k, wide_v, dk, dv))
            for call in calls:
                placed, how = place(call, q.device), _how(call, attention, q.device, state.dropout is not None)
                some_q, some_out, some_dout = (take(x, placed.q) for x in (q, out, dout))
                some_dq, some_dk, some_dv = self._run.backward(
                    some_q, take(kk, placed.k), take(vv, placed.k), some_dout.contiguous(), some_out.contiguous(),
                    take(lse, placed.q).T.contiguous(), _kept(state, call, part), how,
                )  # fmt: skip
                add_to((dq,), placed.q_back, (some_dq[..., :width],))
                add_to((part_dk, part_dv), placed.k_back, (some_dk[..., :width], some_dv[..., :width_v]))


def _join(into: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> None:
    """Merge rows of two results."""
    (out, lse), (part, part_lse) = into, more
    merge_parts_(out, lse, part.contiguous()[None], part_lse.contiguous()[None])


def _add(call: FusedCall, placed: Placed, out: Tensor, lse: Tensor, some: Tensor, some_lse: Tensor) -> None:
    """Store or merge a call's result. Rows that no call has touched have lse -inf: a merge takes their out for 0."""
    target = placed.q_back.target
    if call.fresh is True:
        put(out, target, some.to(out.dtype))
        put(lse, target, some_lse)
        return
    so_far, so_far_lse = take(out, target), take(lse, target)
    _join((so_far, so_far_lse), (some, some_lse))
    if isinstance(target, Tensor):
        put(out, target, so_far)
        put(lse, target, so_far_lse)


def _how(call: FusedCall, attention: AttentionConfig, device: torch.device, drops: bool) -> Packed:
    """Made at the first call."""
    scale, dropout = attention.softmax_scale, attention.dropout if drops else 0.0
    key = "flash", device, scale, dropout
    if key not in call.placed:
        cu_q, cu_k = (np.array([0, *cu], np.int32) for cu in (call.cu_q, call.cu_k))
        most_q, most_k = int(np.diff(cu_q).max()), int(np.diff(cu_k).max())
        call.placed[key] = Packed(
            torch.from_numpy(cu_q).to(device), torch.from_numpy(cu_k).to(device), max(2, most_q),
            max(2, most_q, most_k), window_of(call, max(most_q, most_k)), scale, dropout,
        )  # fmt: skip
    found: Packed = call.placed[key]
    return found


def window_of(call: FusedCall, longest: int) -> tuple[int, int]:
    """(left, right) of a call in Ascend's modes 0, 3 and 4; -1 where nothing is cut off in sequences of that length."""
    if call.sparse_mode == 0:
        return -1, -1
    if call.sparse_mode == 3:
        return -1, 0
    left, right = (-1 if far >= longest else far for far in (call.pre, call.next))
    return left, right


def _kept(state: BackwardState, call: FusedCall, part: EvenPart) -> Kept:
    """What the forward kept of the call; nothing without dropout.

    Raises:
        ConfigError: there was no such call.
    """
    if state.dropout is None:
        return ()
    if (call.identity, part.first) not in state.kept:
        raise ConfigError(
            "attention.dropout is above 0 and the backward has a call that the forward had not, so that it cannot drop "
            "the same weights; valid for flash attention: plans with the same tiles in both directions, or dropout 0.0"
        )
    kept: Kept = state.kept[call.identity, part.first]
    return kept


def _wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one width, a multiple of CHANNELS: new channels are zero, and change neither scores nor outputs."""
    width = -(-max(q.shape[-1], v.shape[-1]) // CHANNELS) * CHANNELS
    return _padded(q, width), _padded(k, width), _padded(v, width)


def _padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
