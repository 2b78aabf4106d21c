"""All ranks of a plan, one after the other, on one device: their kernels without their messages.

What a rank would have received is copied from the whole batch. That checks, and times, what a plan's tiles become on a
device without a second one. It does not check messages: `verify_plan` and the tests on several ranks do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.engine.agenda import heads_of, stores_all_rows
from mindspeed_cp.layout import Layout, expand
from mindspeed_cp.ops.attention import AttentionBackend, BackwardState, DropoutKey, ForwardState
from mindspeed_cp.plan import Plan, is_in


@dataclass(frozen=True)
class Virtual:
    """What all ranks of a plan compute together.

    Attributes:
        out: [tokens, heads, head_dim_v] of q's type.
        lse: fp32 [tokens, heads].
        dq, dk, dv: fp32, of the shapes of q, k and v.
        ranks: each rank after its forward and backward; of a plan of parts for each part.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    ranks: list[VirtualRank]


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
    """Forward and backward of every rank of a plan, on the device of the tensors.

    Args:
        plan: any plan.
        q, dout: of the whole batch, [tokens, heads, head_dim] and [tokens, heads, head_dim_v].
        k, v: of the whole batch, [tokens, kv_heads, head_dim] and [tokens, kv_heads, head_dim_v].
        backend: of the attention operator.
        dropout_key: (seed, layer), where the plan drops.

    Raises:
        ConfigError: the backend does not support the plan's attention.
    """
    backend.check(plan.attention, q.dtype)
    backend.check_device(q.device)
    out = q.new_zeros(dout.shape)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    ranks = []
    for piece in plan.pieces:
        rows, kv_rows = (
            torch.from_numpy(np.flatnonzero(is_in(piece)[np.repeat(np.arange(len(whole)), whole.lengths)])).to(q.device)
            for whole in (plan.documents, plan.kv_documents)
        )
        mine = q[rows], k[kv_rows], v[kv_rows], dout[rows]
        piece_dk, piece_dv = (torch.zeros_like(x, dtype=torch.float32) for x in mine[1:3])
        for rank in range(plan.ranks):
            one = VirtualRank(piece, rank, backend, *mine, dropout_key)
            one.forward()
            one.backward(piece_dk, piece_dv)
            at = rows[one.rows][:, None], torch.arange(*one.heads.q, device=q.device)
            out[at], lse[at], dq[at] = one.state.out.to(q.dtype), one.state.lse, one.dq
            ranks.append(one)
        dk[kv_rows], dv[kv_rows] = piece_dk, piece_dv
    return Virtual(out, lse, dq, dk, dv, ranks)


class VirtualRank:
    """One rank of a plan without parts, whose slots are filled from the whole batch. What nobody would have sent is
    NaN, and so are outputs that the first result of a row is to replace: a kernel that reads either shows.

    Attributes:
        rows: tokens of its queries.
        heads: that it computes.
        state: of its forward.
        dq: fp32, of its queries; filled by `backward`.
        calls: of the backend in the forward and in the backward, so far.
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
        self.heads = heads_of(plan, rank)
        self.rows = _tokens(plan.q_layout, rank, q.device)
        mine, self._theirs = slice(*self.heads.q), slice(*self.heads.kv)
        self._q, self._dout = (x[self.rows][:, mine].contiguous() for x in (q, dout))
        self._k, self._v = (x[:, self._theirs] for x in (k, v))
        self._tiles = {direction: getattr(plan, direction).tiles(rank) for direction in ("forward", "backward")}
        begin = float("nan") if stores_all_rows(self._tiles["forward"], len(self.rows)) else 0.0
        self.state = ForwardState(
            self._q,
            q.new_full((len(self.rows), self._q.shape[1], v.shape[2]), begin, dtype=torch.float32),
            q.new_full(self._q.shape[:2], float("-inf"), dtype=torch.float32),
            self.heads,
            key,
        )
        self.dq = torch.zeros_like(self._q, dtype=torch.float32)
        self.calls = [0, 0]

    def forward(self) -> None:
        """Fills `state`."""
        for calls, k, v, _, _ in self.places("forward"):
            self._backend.forward(calls, self._plan.attention, self.state, k, v)
            self.calls[0] += len(calls)

    def backward(self, dk: Tensor, dv: Tensor) -> None:
        """Fills `dq` and adds to the batch's dk and dv."""
        s = self.state
        back = BackwardState(s.q, s.out.to(s.q.dtype), s.lse, self._dout, self.dq, s.heads, s.dropout, s.kept)
        for calls, k, v, rows, tokens in self.places("backward"):
            parts = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
            self._backend.backward(calls, self._plan.attention, back, k, v, parts[0], parts[1])
            for total, part in zip((dk, dv), parts, strict=True):
                total[:, self._theirs] = total[:, self._theirs].index_add(0, tokens, part[rows])
            self.calls[1] += len(calls)

    def places(self, direction: str) -> Iterator[tuple[Any, Tensor, Tensor, Tensor, Tensor]]:
        """Calls of each step and slot, its keys and values, which of its rows hold something, and their tokens."""
        plan, device = self._plan, self._q.device
        program = getattr(plan, direction)
        lower = self._backend.lower_forward if direction == "forward" else self._backend.lower_backward
        contents = program.contents_of(self._rank)
        lowered = lower(self._tiles[direction], len(self._q), plan.attention, self._q.dtype)
        for (step, slot), calls in lowered.items():
            rows, tokens = [], []
            for content in contents[(contents["step"] == step) & (contents["slot"] == slot)]:
                spans = program.spans_in(content)
                tokens.append(torch.from_numpy(expand(spans["start"], spans["stop"] - spans["start"])))
                rows.append(torch.arange(len(tokens[-1])) + int(content["row"]))
            at, of = torch.cat(rows).to(device), torch.cat(tokens).to(device)
            capacity = int(program.capacity[self._rank, slot])
            k, v = (x.new_full((capacity, *x.shape[1:]), float("nan")) for x in (self._k, self._v))
            k[at], v[at] = self._k[of], self._v[of]
            yield calls, k, v, at, of


def _tokens(layout: Layout, rank: int, device: torch.device) -> Tensor:
    spans = layout.of(rank)
    return torch.from_numpy(expand(spans["start"], spans["stop"] - spans["start"])).to(device)
