"""Where a rank's linear layers run: between the two directions of attention, or around it.

::

    the caller's rows        attention forward ── linear layers ── attention backward
    `Plan.linear`            move, q k v, attention, out, move ── the rest ── move, out, attention, q k v, move

With the second, projections are those of the rows that attention's layout has, the rest those of the linear layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cost.compute import ComputeCost
from mindspeed_cp.cost.transfers import edges
from mindspeed_cp.plan.program import Plan


@dataclass(frozen=True, eq=False)
class LinearSeconds:
    """Of each rank in one direction, fp64 [ranks].

    Attributes:
        before, after: projections that run before and after attention in this direction.
        rest: what runs outside: after the forward, before the backward.
    """

    before: np.ndarray
    after: np.ndarray
    rest: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """All of them."""
        return self.before + self.after + self.rest


def linear_seconds(plan: Plan, cost: ComputeCost, backward: bool) -> LinearSeconds:
    """Modelled seconds of a direction's linear layers."""
    rows = plan.layout.token_counts
    if plan.linear is None:
        nothing = np.zeros(plan.ranks)
        return LinearSeconds(nothing, nothing, cost.linear_seconds(rows, backward))
    qkv, out = (cost.linear_seconds(rows, backward, part) for part in ("qkv", "out"))
    rest = cost.linear_seconds(plan.linear.token_counts, backward, "rest")
    return LinearSeconds(out, qkv, rest) if backward else LinearSeconds(qkv, out, rest)


def with_projections(kernels: np.ndarray, linear: LinearSeconds, plan: Plan) -> np.ndarray:
    """Kernels of the plan's turns, fp64 [ranks, plan turns], with the turns before and after them
    (:func:`.transfers.edges`), in which projections may run: fp64 [ranks, turns]."""
    out = np.pad(kernels, ((0, 0), (edges(plan), edges(plan))))
    if plan.linear is not None:
        out[:, 1], out[:, -2] = linear.before, linear.after
    return out
