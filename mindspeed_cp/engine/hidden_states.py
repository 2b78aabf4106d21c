"""Redistribution of hidden states between the layout of linear layers and the layout of attention, under autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.comm.group_transport import Transport
from mindspeed_cp.comm.redistribution import RankRedistribution, rank_redistribution
from mindspeed_cp.engine.plan_cache import kept_with_plan
from mindspeed_cp.engine.program_run import Run, redistribute, run_to_end
from mindspeed_cp.layout import Redistribution, sequence_parallel_layout
from mindspeed_cp.plan import Plan

#: Redistributions of one rank there and back: from linear layers to attention and the reverse, or these two reversed.
ThereAndBack = tuple[RankRedistribution, RankRedistribution]


def hidden_redistribution(
    plan: Plan, rank: int, device: torch.device, shares: int = 1, multiple: int = 1
) -> ThereAndBack:
    """Return the redistributions of a rank between `plan.linear_layout` and `plan.layout`, with row numbers on a
    device. The first call computes them; they are kept as long as the plan lives.

    Args:
        plan: a plan with a linear layout.
        rank: rank in the context-parallel group; with shares, context-parallel rank * shares + tensor-parallel rank.
        device: device of the tensors.
        shares: number of ranks that share the rows of a context-parallel rank (sequence parallelism).
        multiple: rows are padded to a multiple of this, see :func:`mindspeed_cp.layout.sequence_parallel_layout`.
    """
    assert plan.linear_layout is not None
    layouts, sharing = (plan.linear_layout, plan.layout), (shares, multiple if shares > 1 else 1)

    def redistribution() -> Redistribution:
        linear, layout = (x if shares == 1 else sequence_parallel_layout(x, *sharing) for x in layouts)
        return Redistribution(linear, layout, 1)

    def rank_redistributions() -> ThereAndBack:
        both = kept_with_plan(plan, ("hidden states", *sharing), redistribution)
        return rank_redistribution(both, rank, device), rank_redistribution(both, rank, device, adjoint=True)

    return kept_with_plan(plan, ("hidden states", rank, device, *sharing), rank_redistributions)


def redistribute_hidden(
    x: Tensor, hidden: ThereAndBack, transport: Transport | None, label: str = "hidden states"
) -> Tensor:
    """Convert rows of linear layers to rows of attention, or the reverse with `hidden[::-1]`. Gradients travel in
    the opposite direction.

    Every rank of the group must call it and run its backward, including ranks without rows.

    Args:
        x: rows of this rank [rows, ...].
        hidden: redistributions of this rank.
        transport: transport to the other ranks.
        label: description for error messages.

    Returns:
        [rows, ...] in the other layout.

    Raises:
        PeerError: a peer died or did not answer in time.
    """
    out: Tensor = _RedistributeHidden.apply(x, hidden, transport, label)
    return out


class _RedistributeHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: ThereAndBack, transport: Transport | None, label: str) -> Tensor:
        ctx.call = hidden, transport, label
        return run_to_end(redistribute_rows(x, hidden[0], transport, label))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, transport, label = ctx.call
        run = redistribute_rows(gradient, hidden[1], transport, f"gradients of {label}")
        return run_to_end(run), None, None, None


def redistribute_rows(
    x: Tensor, redistribution: RankRedistribution, transport: Transport | None, label: str
) -> Run[Tensor]:
    """Redistribute rows of any shape [rows, ...]; a computation that can be interleaved with those of other ranks."""
    rows = x.flatten(1).unsqueeze(1).contiguous()
    (out,) = yield from redistribute((rows,), (redistribution,), transport, label)
    return out.reshape(len(out), *x.shape[1:])
