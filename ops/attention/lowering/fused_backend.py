"""The loops over head groups and calls that backends on a fused varlen operator share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, OutputAccumulator
from mindspeed_cp.ops.attention.contract import (
    BackwardState,
    ForwardState,
    HeadGroup,
    pad_head_dim,
    uniform_head_groups,
)
from mindspeed_cp.ops.attention.lowering.device_call import DeviceCall, on_device
from mindspeed_cp.ops.attention.lowering.fused_call import FusedCall
from mindspeed_cp.ops.rows import put_rows, take_rows
from mindspeed_cp.plan import AttentionConfig

#: Key of the largest scores among what the forward saves for the backward.
LARGEST_SCORE = "largest score"


class FusedBackend(ABC):
    """Forward and backward of an attention backend; a subclass runs and merges single calls.

    Dropped weights are drawn by the operator from the device's generator, not from the dropout key; the backward drops
    the same weights by the saved state of the generator, and needs the tiles of its forward.
    """

    #: Name of the backend in error messages.
    title: str

    #: False if :meth:`_merge` ignores accumulators whose lse is -inf; then they need not be cleared before.
    clears_unwritten_rows = True

    @abstractmethod
    def _pad_head_dims(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pad head dimensions with zeros to what the operator accepts."""

    @abstractmethod
    def _forward_call(
        self, call: FusedCall, attention: AttentionConfig, group: HeadGroup, qkv: tuple[Tensor, ...], dropout: bool
    ) -> tuple[Tensor, Tensor, Any, Tensor | None]:
        """Run the forward of one call.

        Args:
            qkv: rows of the call, [rows, heads of the group, dim].
            dropout: drop weights.

        Returns:
            out [rows, heads, dim], lse fp32 [rows, heads], the state of the random numbers, and the largest score of
            each row, fp32 [rows, heads]; None if the backward does not need it.
        """

    @abstractmethod
    def _backward_call(
        self, call: FusedCall, attention: AttentionConfig, group: HeadGroup, qkv: tuple[Tensor, ...],
        dout: Tensor, out: Tensor, lse: Tensor, largest: Tensor | None, rng_state: Any, dropout: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dq, dk and dv of one call, [rows, heads, dim], from the complete out and lse, and the largest score of
        each row over all keys if the forward has kept it."""

    @abstractmethod
    def _merge(self, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge a partial result into fp32 accumulators, in place where possible, and return them."""

    @abstractmethod
    def _merge_duplicates(self, into: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> None:
        """Merge (out, lse) of rows of a call into other rows of the same call, in place."""

    @property
    @abstractmethod
    def _no_rng_state(self) -> Any:
        """The state of the random numbers where nothing is dropped."""

    def forward(
        self, calls: Sequence[FusedCall], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See :class:`~mindspeed_cp.ops.attention.contract.AttentionBackend`."""
        head_dim_v, dropout = v.shape[-1], state.dropout is not None
        all_q, all_k, all_v = self._pad_head_dims(state.q, k, v)
        for group in uniform_head_groups(attention, state.heads):
            q, k, v = all_q[:, group.q], all_k[:, group.kv], all_v[:, group.kv]
            for call in calls:
                on = on_device(call, q.device)
                qkv = take_rows(q, on.q), take_rows(k, on.k), take_rows(v, on.k)
                part_out, part_lse, rng_state, largest = self._forward_call(call, attention, group, qkv, dropout)
                if dropout:
                    state.saved[call.content_key, group.q_range] = rng_state
                part_out = part_out[..., :head_dim_v]
                if on.q_scatter.merges:
                    part_out = part_out.float().contiguous()
                    on.q_scatter.merge_duplicates((part_out, part_lse), self._merge_duplicates)
                self._accumulate(call, on, state.output, group.q, part_out, part_lse)
                if largest is not None:
                    _keep_largest(state, group, on, largest)

    def backward(
        self,
        calls: Sequence[FusedCall],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: GradientAccumulator,
        dv: GradientAccumulator,
    ) -> None:
        """See :class:`~mindspeed_cp.ops.attention.contract.AttentionBackend`."""
        head_dim, head_dim_v, dropout = k.shape[-1], v.shape[-1], state.dropout is not None
        all_q, all_k, all_v = self._pad_head_dims(state.q, k, v)
        all_out, all_dout = (pad_head_dim(x, all_v.shape[-1]) for x in (state.out, state.dout))
        for group in uniform_head_groups(attention, state.heads):
            q, out, lse, dout = (x[:, group.q] for x in (all_q, all_out, state.lse, all_dout))
            group_k, group_v = all_k[:, group.kv], all_v[:, group.kv]
            for call in calls:
                on = on_device(call, q.device)
                qkv = take_rows(q, on.q), take_rows(group_k, on.k), take_rows(group_v, on.k)
                call_dout, call_out, call_lse = (take_rows(x, on.q) for x in (dout, out, lse))
                rng_state = self._saved_rng_state(state, call, group)
                largest = state.saved.get((LARGEST_SCORE, group.q_range))
                call_largest = None if largest is None else take_rows(largest, on.q)
                dq_part, dk_part, dv_part = self._backward_call(
                    call, attention, group, qkv, call_dout, call_out, call_lse, call_largest, rng_state, dropout
                )
                on.q_scatter.add_to((state.dq,), (dq_part[..., :head_dim],), group.q)
                on.k_scatter.add_to((dk, dv), (dk_part[..., :head_dim], dv_part[..., :head_dim_v]), group.kv)

    def _accumulate(
        self,
        call: FusedCall,
        on: DeviceCall,
        output: OutputAccumulator,
        heads: slice,
        part_out: Tensor,
        part_lse: Tensor,
    ) -> None:
        """Store the result of a call, or merge it with those before."""
        target = on.q_scatter.target
        part_out, part_lse = take_rows(part_out, on.q_scatter.source), take_rows(part_lse, on.q_scatter.source)
        if call.unwritten is True:
            output.store(target, heads, part_out, part_lse)
            return
        out, lse = (x[:, heads] for x in output.fp32())
        if self.clears_unwritten_rows and on.unwritten is not None:
            put_rows(out, on.unwritten, 0)
        rows, rows_lse = (take_rows(x, target).contiguous() for x in (out, lse))
        results = self._merge(rows, rows_lse, part_out, part_lse)
        for total, merged in zip((out, lse), results, strict=True):
            if isinstance(target, Tensor) or merged.data_ptr() != total[target].data_ptr():
                put_rows(total, target, merged)

    def _saved_rng_state(self, state: BackwardState, call: FusedCall, group: HeadGroup) -> Any:
        """Return the state that the forward of the call saved.

        Raises:
            ConfigError: the forward had no such call.
        """
        if state.dropout is None:
            return self._no_rng_state
        key = call.content_key, group.q_range
        if key not in state.saved:
            raise ConfigError(
                "attention.dropout is above 0 and the backward has a call that the forward did not have, so that it "
                f"cannot drop the same weights; valid for {self.title}: plans with the same tiles in both directions, "
                "or dropout 0.0"
            )
        return state.saved[key]


def _keep_largest(state: ForwardState, group: HeadGroup, on: DeviceCall, largest: Tensor) -> None:
    """Keep the largest score of each row for the backward, over this call and those before."""
    key = LARGEST_SCORE, group.q_range
    if key not in state.saved:
        shape = len(state.q), group.q.stop - group.q.start
        state.saved[key] = state.q.new_full(shape, -torch.inf, dtype=torch.float32)
    kept, target = state.saved[key], on.q_scatter.target
    on.q_scatter.merge_duplicates((largest,), _take_larger)
    of_targets = take_rows(largest, on.q_scatter.source)
    put_rows(kept, target, torch.maximum(take_rows(kept, target), of_targets))


def _take_larger(into: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> None:
    for x, y in zip(into, more, strict=True):
        torch.maximum(x, y, out=x)
