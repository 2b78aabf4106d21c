"""What one rank does in a layer, and what a plan says that a layer sends and computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.cluster.modelled import ModelledAttention
from mindspeed_cp import context_parallel_attention
from mindspeed_cp.comm import GroupTransport, rank_redistribution, start_redistributions
from mindspeed_cp.engine import prepare
from mindspeed_cp.layout import Redistribution
from mindspeed_cp.plan import Plan, traffic

DTYPE = torch.bfloat16
TIMEOUT = 1800.0  # seconds: only a hang takes so long


class Border:
    """Moves hidden states between the layouts of linear layers and of attention, where a plan says so; hidden states
    are as wide as all heads.

    Args:
        plan: of the layer.
        rank: of its group.
        group: that computes the plan; None: all processes.
    """

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup | None = None) -> None:
        linear = plan.batch_layout
        rows = int(linear.token_counts[rank])
        between = Redistribution.between(linear, plan.layout, 1)
        width, cpu = hidden(plan), torch.device("cpu")
        self._redistributions = None
        if between is not None:
            self._redistributions = (
                rank_redistribution(between, rank, cpu),
                rank_redistribution(between, rank, cpu, adjoint=True),
            )
            self._held = [torch.zeros(n, 1, width, dtype=DTYPE) for n in (rows, plan.layout.token_counts[rank])]
            self._transport = GroupTransport(group)

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
    out = [0.0] * plan.ranks
    if linear:
        forward, backward = (model.linear_times(plan, direction).total for direction in (False, True))
        out = (forward + backward).tolist()
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


def layer_run(
    plan: Plan,
    rank: int,
    model: ModelledAttention,
    kernels: str,
    linear: bool,
    group: dist.ProcessGroup | None = None,
) -> Callable[[], None]:
    """Return a rank's share of a layer: attention forward, linear layers forward and backward, attention backward.

    Args:
        plan: with the rows that really travel.
        rank: of the group.
        model: takes modelled times.
        kernels: "modelled", or "run" on this machine's cores.
        linear: the linear part takes its modelled time.
        group: that computes the plan; None: all processes.
    """
    a, backend = plan.attention, model if kernels == "modelled" else None
    rows, kv_rows = int(plan.layout.token_counts[rank]), int(plan.kv_layout_in.token_counts[rank])
    shapes = (
        (rows, a.heads, a.head_dim),
        (kv_rows, a.kv_heads, a.head_dim),
        (kv_rows, a.kv_heads, a.head_dim_v),
        (rows, a.heads, a.head_dim_v),
    )
    generator = torch.Generator().manual_seed(rank)
    q, k, v, dout = (
        torch.randn(shape, generator=generator).to(DTYPE).requires_grad_(i < 3) for i, shape in enumerate(shapes)
    )
    prepare(plan, rank, DTYPE, backend)
    border = Border(plan, rank, group)
    forward, backward = (model.linear_times(plan, direction) for direction in (False, True))

    def take(seconds: np.ndarray) -> None:
        if linear:
            model.take(float(seconds[rank]))

    def run() -> None:
        border.there()
        take(forward.before)
        out = context_parallel_attention(q, k, v, plan, group, backend, TIMEOUT)
        take(forward.after)
        border.back()
        take(forward.rest)
        take(backward.rest)
        border.there()
        take(backward.before)
        torch.autograd.grad(out, (q, k, v), dout)
        take(backward.after)
        border.back()

    return run
