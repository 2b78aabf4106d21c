"""Runs the kernels of all ranks of a plan, one rank after the other, on one device and without messages.

Slots are filled from the whole batch instead of from messages, and NaN marks rows that no message would fill. This
checks and times the kernel calls of a plan on a device. It does not check messages: `verify_plan` and
:mod:`mindspeed_cp.engine.all_ranks` do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.engine.rank_context import part_heads, stores_all_rows
from mindspeed_cp.layout import Layout, ragged_arange
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, OutputAccumulator
from mindspeed_cp.ops.attention.contract import AttentionBackend, BackwardState, DropoutKey, ForwardState
from mindspeed_cp.plan import Plan, document_mask


@dataclass(frozen=True)
class Virtual:
    """Results of all ranks of a plan.

    Attributes:
        out: [tokens, heads, head_dim_v] of q's type.
        lse: fp32 [tokens, heads].
        dq, dk, dv: fp32, of the shapes of q, k and v.
        ranks: every rank after its forward and backward; in a plan of parts, every rank of each part.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    ranks: list[IsolatedRank]


@torch.no_grad()
def attend_virtually(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    backend: AttentionBackend,
    dropout_key: DropoutKey | None = None,
) -> Virtual:
    """Run the forward and backward of every rank of a plan, on the device of the tensors.

    Args:
        plan: any plan.
        q, dout: the whole batch, [tokens, heads, head_dim] and [tokens, heads, head_dim_v].
        k, v: the whole batch, [tokens, kv_heads, head_dim] and [tokens, kv_heads, head_dim_v].
        backend: attention backend.
        dropout_key: (seed, layer), if the plan has dropout.

    Raises:
        ConfigError: the backend does not support the plan's attention.
    """
    backend.check(plan.attention, q.dtype)
    backend.check_device(q.device)
    out = q.new_zeros(dout.shape)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    ranks = []
    for part in plan.parts_or_self:
        in_part = document_mask(part)
        rows, kv_rows = (
            torch.from_numpy(np.flatnonzero(np.repeat(in_part, documents.lengths))).to(q.device)
            for documents in (plan.documents, plan.kv_documents)
        )
        tensors = q[rows], k[kv_rows], v[kv_rows], dout[rows]
        part_dk, part_dv = (torch.zeros_like(x, dtype=torch.float32) for x in tensors[1:3])
        for rank in range(plan.ranks):
            isolated = IsolatedRank(part, rank, backend, *tensors, dropout_key)
            isolated.forward()
            isolated.backward(part_dk, part_dv)
            index = rows[isolated.rows][:, None], torch.arange(*isolated.heads.q, device=q.device)
            out[index], lse[index] = isolated.result()
            dq[index] = isolated.dq.result(torch.float32)
            ranks.append(isolated)
        dk[kv_rows], dv[kv_rows] = part_dk, part_dv
    return Virtual(out, lse, dq, dk, dv, ranks)


class NanOutput(OutputAccumulator):
    """An accumulator of outputs whose uninitialized memory is NaN."""

    def _new(self) -> tuple[Tensor, Tensor]:
        out, lse = super()._new()
        return out.fill_(float("nan")) if self._stores_all_rows else out, lse


class IsolatedRank:
    """One rank of a plan without parts, whose slots are filled from the whole batch. Rows that no message fills are
    NaN, and so are outputs that the first result of a row must replace: a kernel that reads either shows.

    Attributes:
        rows: tokens of its queries.
        heads: heads that it computes.
        state: state of its forward.
        dq: gradient of its queries; filled by `backward`.
        calls: number of backend calls so far, in the forward and in the backward.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        backend: AttentionBackend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        key: DropoutKey | None,
    ) -> None:
        self._plan, self._rank, self._backend = plan, rank, backend
        self.heads = part_heads(plan, rank)
        self.rows = _tokens(plan.q_layout_compute, rank, q.device)
        heads, self._kv_heads = slice(*self.heads.q), slice(*self.heads.kv)
        self._q, self._dout = (x[self.rows][:, heads].contiguous() for x in (q, dout))
        self._k, self._v = (x[:, self._kv_heads] for x in (k, v))
        self._tiles = {direction: getattr(plan, direction).tiles(rank) for direction in ("forward", "backward")}
        self._stores_all_rows = stores_all_rows(self._tiles["forward"], len(self.rows))
        self._key = key
        self.calls = [0, 0]
        self.start()

    def start(self) -> None:
        """Forget all results."""
        output = NanOutput(self._q, self._v.shape[2], self._stores_all_rows)
        self.state = ForwardState(self._q, output, self.heads, self._key)
        self.dq = GradientAccumulator(self._q)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return out of q's type, and lse."""
        return self.state.output.result(self._q.dtype)

    def backward_state(self) -> BackwardState:
        """Return the state of the backward of the forward that has run."""
        s = self.state
        return BackwardState(s.q, *self.result(), self._dout, self.dq, s.heads, s.dropout, s.saved)

    def forward(self) -> None:
        """Run the forward; fills `state`."""
        for calls, k, v, _, _ in self.slot_calls("forward"):
            self._backend.forward(calls, self._plan.attention, self.state, k, v)
            self.calls[0] += len(calls)

    def backward(self, dk: Tensor, dv: Tensor) -> None:
        """Run the backward; fills `dq` and adds to dk and dv of the batch."""
        backward_state = self.backward_state()
        for calls, k, v, rows, tokens in self.slot_calls("backward"):
            parts = [GradientAccumulator(x) for x in (k, v)]
            self._backend.backward(calls, self._plan.attention, backward_state, k, v, parts[0], parts[1])
            for total, part in zip((dk, dv), parts, strict=True):
                total[:, self._kv_heads] = total[:, self._kv_heads].index_add(0, tokens, part.rows(rows, torch.float32))
            self.calls[1] += len(calls)

    def slot_calls(self, direction: str) -> Iterator[tuple[Any, Tensor, Tensor, Tensor, Tensor]]:
        """Yield the calls of each step and slot, its keys and values, its filled rows, and their tokens."""
        plan, device = self._plan, self._q.device
        program = getattr(plan, direction)
        contents = program.contents_of(self._rank)
        lowered = self._backend.lower(direction, self._tiles[direction], len(self._q), plan.attention, self._q.dtype)
        for (step, slot), calls in lowered.items():
            rows, tokens = [], []
            for content in contents[(contents["step"] == step) & (contents["slot"] == slot)]:
                spans = program.spans_in(content)
                tokens.append(torch.from_numpy(ragged_arange(spans["start"], spans["stop"] - spans["start"])))
                rows.append(torch.arange(len(tokens[-1])) + int(content["row"]))
            filled, filled_tokens = torch.cat(rows).to(device), torch.cat(tokens).to(device)
            capacity = int(program.capacity[self._rank, slot])
            k, v = (x.new_full((capacity, *x.shape[1:]), float("nan")) for x in (self._k, self._v))
            k[filled], v[filled] = self._k[filled_tokens], self._v[filled_tokens]
            yield calls, k, v, filled, filled_tokens


def _tokens(layout: Layout, rank: int, device: torch.device) -> Tensor:
    spans = layout.rank_spans(rank)
    return torch.from_numpy(ragged_arange(spans["start"], spans["stop"] - spans["start"])).to(device)
