"""context_parallel_roll: every row gets the row k tokens later in its document, across ranks, under autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.comm.group_transport import DEFAULT_TIMEOUT, GroupTransport, Transport, checked_timeout
from mindspeed_cp.comm.groups import group_rank, group_size
from mindspeed_cp.comm.redistribution import RankRedistribution, as_row_index, rank_redistribution
from mindspeed_cp.engine.agreement import CallAgreement
from mindspeed_cp.engine.plan_cache import kept_with_plan
from mindspeed_cp.engine.program_run import Run, redistribute, run_to_end
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Layout, Roll
from mindspeed_cp.ops.rows import RowIndex, put_rows
from mindspeed_cp.plan import Plan
from mindspeed_cp.schema.numbers import check_type, is_int


@dataclass(frozen=True)
class RankRoll:
    """What one rank does in a roll in one direction.

    Attributes:
        redistribution: from the rows that others get to the rows that this rank gets.
        target_rows: where these go; other rows are filled.
    """

    redistribution: RankRedistribution
    target_rows: RowIndex


def rank_roll(layout: Layout, shift: int, rank: int, device: torch.device) -> RankRoll:
    """Return what a rank does in the roll of a layout, with row numbers on a device."""
    roll = Roll(layout, shift)
    target = roll.target_rows(rank)
    moved = rank_redistribution(roll.redistribution, rank, device, rows=roll.source_rows(rank))
    return RankRoll(moved, as_row_index(target, target * 0 + 1, device))


def roll_run(x: Tensor, roll: RankRoll, transport: Transport | None, fill: float, label: str) -> Run[Tensor]:
    """Roll the rows of one rank [rows, ...]; a computation that can be interleaved with those of other ranks."""
    rows = x.reshape(len(x), 1, math.prod(x.shape[1:])).contiguous()
    carried = rows.to(torch.uint8) if x.dtype is torch.bool else rows  # not every library sends bool
    (moved,) = yield from redistribute((carried,), (roll.redistribution,), transport, label)
    out = torch.full_like(rows, fill)
    put_rows(out, roll.target_rows, moved.to(x.dtype))
    return out.reshape(x.shape)


def context_parallel_roll(
    x: Tensor,
    plan: Plan,
    shift: int = 1,
    group: dist.ProcessGroup | None = None,
    *,
    fill: float = 0,
    timeout: float = DEFAULT_TIMEOUT,
) -> Tensor:
    """Return, for every row of this rank, the row `shift` tokens later in the same document, whichever rank holds it.

    Only rows whose successor is on another rank travel: `shift` rows at each border between token spans. Every rank of
    the group must call it, and run its backward if x requires gradients, including ranks without tokens. The gradient
    is the roll by -shift.

    Args:
        x: rows of this rank in ``plan.batch_layout``, [rows, ...] of any type: tokens, labels, positions, hidden
            states.
        plan: from :func:`mindspeed_cp.build_plan`, the same on every rank.
        shift: number of tokens, the same on every rank; negative for rows that stand earlier.
        group: context-parallel ranks; default: all processes.
        fill: value of rows whose document has no such token.
        timeout: seconds to wait for a peer, on gloo.

    Returns:
        [rows, ...] of the type of x.

    Raises:
        ConfigError: the rows, the shift or the group do not fit the plan, or ranks have different plans.
        PeerError: a peer died or did not answer in time.
    """
    check_type("plan", plan, Plan, "a Plan, from build_plan")
    if not is_int(shift):
        raise ConfigError(f"shift is {shift!r}; valid: an integer, the number of tokens")
    ranks = group_size(group, "context_parallel_roll", plan.ranks)
    rank = group_rank(group) if ranks > 1 else 0
    rows = int(plan.batch_layout.token_counts[rank])
    if not isinstance(x, Tensor) or x.dim() < 1 or len(x) != rows:
        shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(f"rank {rank}: x has shape {shape}; valid: [{rows}, ...], the rows of plan.batch_layout")
    transport = None
    if ranks > 1:
        transport = GroupTransport(group, checked_timeout(timeout), x.device)
        key = "roll", group if group is not None else dist.group.WORLD, timeout, x.device
        kept_with_plan(plan, key, lambda: CallAgreement(group, timeout, x.device)).check(plan, x.dtype)
    roll = _rank_roll(plan, int(shift), rank, x.device)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return run_to_end(roll_run(x, roll, transport, fill, "rows of a roll"))
    out: Tensor = _Roll.apply(x, roll, _rank_roll(plan, -int(shift), rank, x.device), transport, fill)
    return out


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: RankRoll, backward: RankRoll, transport: Transport | None, fill: float
    ) -> Tensor:
        ctx.call = backward, transport
        return run_to_end(roll_run(x, forward, transport, fill, "rows of a roll"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        backward, transport = ctx.call
        return run_to_end(roll_run(gradient, backward, transport, 0, "gradients of a roll")), None, None, None, None


def _rank_roll(plan: Plan, shift: int, rank: int, device: torch.device) -> RankRoll:
    """Return what a rank does in a roll of the plan; it is kept as long as the plan lives."""
    key = shift, rank, device
    return kept_with_plan(plan, ("roll", *key), lambda: rank_roll(plan.batch_layout, *key))
