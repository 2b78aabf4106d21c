"""When a rank's linear layers run: between the two directions of attention, or around attention.

::

    same layout              attention forward, linear layers, attention backward
    `Plan.linear_layout` is set     redistribution, q k v, attention, out, redistribution, other linear layers,
                             redistribution, out, attention, q k v, redistribution

In the second case projections run on the rows of attention's layout, other linear layers on those of the linear layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cluster.compute import ComputeCost
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.transfers import edge_steps


@dataclass(frozen=True, eq=False)
class LinearTimes:
    """Seconds of each rank's linear layers in one direction, fp64 [ranks].

    Attributes:
        before, after: projections that run before and after attention.
        rest: other linear layers: after attention in the forward, before it in the backward.
    """

    before: np.ndarray
    after: np.ndarray
    rest: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Sum of the three."""
        return self.before + self.after + self.rest


def linear_times(plan: Plan, cost: ComputeCost, backward: bool) -> LinearTimes:
    """Return the modelled seconds of a direction's linear layers."""
    rows = plan.layout.token_counts
    if plan.linear_layout is None:
        zeros = np.zeros(plan.ranks)
        return LinearTimes(zeros, zeros, cost.linear_layer_seconds(rows, backward))
    qkv, out = (cost.linear_layer_seconds(rows, backward, part) for part in ("qkv", "out"))
    rest = cost.linear_layer_seconds(plan.linear_layout.token_counts, backward, "rest")
    return LinearTimes(out, qkv, rest) if backward else LinearTimes(qkv, out, rest)


def with_projections(kernels: np.ndarray, linear: LinearTimes, plan: Plan) -> np.ndarray:
    """Add the edge steps, in which projections run, to the seconds of the plan's steps.

    Args:
        kernels: fp64 [ranks, plan steps].

    Returns:
        fp64 [ranks, timeline steps] (:func:`mindspeed_cp.plan.transfers.edge_steps`).
    """
    out = np.pad(kernels, ((0, 0), (edge_steps(plan), edge_steps(plan))))
    if plan.linear_layout is not None:
        out[:, 1], out[:, -2] = linear.before, linear.after
    return out
