"""What one rank does around attention in a layer, and what a plan says that a layer sends and computes."""

from __future__ import annotations

import torch

from benchmarks.cluster.modelled import ModelledAttention
from mindspeed_cp.comm import GroupTransport, rank_redistribution, start_redistributions
from mindspeed_cp.layout import Redistribution
from mindspeed_cp.plan import Plan, traffic

DTYPE = torch.bfloat16


class Border:
    """Moves hidden states between the layouts of linear layers and of attention, where a plan says so; hidden states
    are as wide as all heads.

    Attributes:
        rows: of this rank's linear layers.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        linear = plan.batch_layout
        self.rows = int(linear.token_counts[rank])
        between = Redistribution.between(linear, plan.layout, 1)
        width, cpu = hidden(plan), torch.device("cpu")
        self._redistributions = None
        if between is not None:
            self._redistributions = (
                rank_redistribution(between, rank, cpu),
                rank_redistribution(between, rank, cpu, adjoint=True),
            )
            self._held = [torch.zeros(n, 1, width, dtype=DTYPE) for n in (self.rows, plan.layout.token_counts[rank])]
            self._transport = GroupTransport(None)

    def there(self) -> None:
        """Move hidden states from the linear layout to attention's."""
        self._move(0)

    def back(self) -> None:
        """Move hidden states from attention's layout to the linear one."""
        self._move(1)

    def _move(self, way: int) -> None:
        if self._redistributions is not None:
            start_redistributions(
                [(self._held[way], self._redistributions[way])], self._transport, "hidden states"
            ).finish()


def hidden(plan: Plan) -> int:
    """Return the channels of a hidden state: those of all heads."""
    return plan.attention.heads * plan.attention.head_dim


def planned_bytes(plan: Plan) -> list[int]:
    """Return the bytes that each rank sends in a layer, forward and backward, as the plan has them."""
    sent = traffic(plan, DTYPE.itemsize)["total"]
    between = None if plan.linear_layout is None else Redistribution.between(plan.linear_layout, plan.layout, 1)
    if between is not None:
        sent = sent + 2 * (between.send_volume() + between.send_volume(adjoint=True)) * hidden(plan) * DTYPE.itemsize
    return [int(size) for size in sent]


def busy_seconds(plan: Plan, model: ModelledAttention, linear: bool) -> list[float]:
    """Return the modelled seconds in which each rank computes attention, forward and backward, and the linear part if
    it is asked for."""
    tokens = plan.batch_layout.token_counts.tolist()
    out = [
        sum(model.linear_layer_seconds(n, backward) for backward in (False, True)) if linear else 0.0 for n in tokens
    ]
    for part in plan.parts_or_self:
        for rank in range(plan.ranks):
            low, high = part.q_layout_compute.head_range(rank, part.attention.heads)
            share, rows = (high - low) / part.attention.heads, int(part.q_layout_compute.token_counts[rank])
            for program, lower in (
                (part.forward, model.lower_forward),
                (part.backward, model.lower_backward),
            ):
                lowered = lower(program.tiles(rank), rows, part.attention, DTYPE)
                out[rank] += sum(work.math * share + work.launch for calls in lowered.values() for work in calls)
    return out
