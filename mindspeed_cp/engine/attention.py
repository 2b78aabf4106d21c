"""context_parallel_attention: one autograd function that runs any plan and knows no algorithm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.comm import DEFAULT_TIMEOUT, Transport, group_rank, group_size
from mindspeed_cp.engine.agenda import agenda_of
from mindspeed_cp.engine.run import Run
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention import AttentionBackend, BackwardState, ForwardState, backend_for
from mindspeed_cp.plan import Plan


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Tensor:
    """Exact attention over all ranks of a plan; every rank of the group calls it with its own rows, and every rank runs
    its backward, one without tokens too: keys and values, and their gradients, pass through all of them.

    Differentiable once; may be run again by activation recompute, and its backward may run again with
    ``retain_graph=True``. out, lse, dq, dk and dv are summed in fp32 over all steps and rounded to q's type in the end
    (the cpu backend's kernel rounds the part of each call as well, see docs/decisions.md).

    Args:
        q: this rank's rows in plan.layout, [t, heads, head_dim].
        k: [t, kv_heads, head_dim].
        v: [t, kv_heads, head_dim_v].
        plan: from :func:`mindspeed_cp.build_plan`, the same on every rank.
        group: the context-parallel ranks; default: all processes.
        backend: of the attention operator; default: by the device of q.
        timeout: seconds until a peer that does not answer in one transfer is given up; on gloo. NCCL and HCCL use the
            time-out of their group.

    Returns:
        [t, heads, head_dim_v] of q's type.

    Raises:
        ConfigError: a shape, a type, the group or the backend does not fit the plan.
        PlanError: the plan computes in another layout than the caller's.
        PeerError: the neighbour that this rank waited for died or did not answer within `timeout`; names it. That one
            may itself have been waiting for another.
    """
    if timeout <= 0:
        raise ConfigError(f"timeout is {timeout} seconds; valid: more than 0")
    runner = backend_for(q.device.type, backend)
    size = group_size(group)
    if size < 0:
        raise ConfigError(
            "this process is not in the group; only the group's own ranks call context_parallel_attention"
        )
    if size != plan.ranks:
        raise ConfigError(
            f"the plan is for {plan.ranks} ranks, but the group has {size}; build the plan for the group's size"
        )
    rank = group_rank(group)
    _check(q, k, v, plan, rank, runner)
    transport = Transport(group, timeout, q.device) if size > 1 else None
    return _Attention.apply(q, k, v, plan, rank, transport, runner)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        rank: int,
        transport: Transport | None,
        backend: AttentionBackend,
    ) -> Tensor:
        attention = plan.attention
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        agenda = agenda_of(plan, rank, "forward", backend)
        run = Run(agenda, k, v, transport)
        empty = q.new_empty if agenda.stores_all_rows else q.new_zeros  # the first tile of a row is stored, not added
        out = empty((len(q), q.shape[1], v.shape[2]), dtype=torch.float32)
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
        state = ForwardState(q, out, lse)
        with torch.autocast(q.device.type, enabled=False):  # accumulators are fp32 whatever autocast says
            run.steps(lambda slot, calls: backend.forward(calls, attention, state, run.k[slot], run.v[slot]))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = plan, rank, transport, backend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        plan, rank, transport, backend = ctx.how
        q, k, v, out, lse = ctx.saved_tensors
        attention = plan.attention
        run = Run(agenda_of(plan, rank, "backward", backend), k, v, transport)
        state = BackwardState(q, out, lse, dout.contiguous(), torch.zeros_like(q, dtype=torch.float32))

        def compute(slot: int, calls: Any) -> None:
            backend.backward(calls, attention, state, run.k[slot], run.v[slot], *run.gradient(slot))

        with torch.autocast(q.device.type, enabled=False):
            run.steps(compute)
        dk, dv = run.gradient(0)
        return state.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Plan, rank: int, backend: AttentionBackend) -> None:
    a = plan.attention
    rows = int(plan.layout.token_counts[rank])
    shapes = (("q", q, a.heads, a.head_dim), ("k", k, a.kv_heads, a.head_dim), ("v", v, a.kv_heads, a.head_dim_v))
    for name, x, heads, width in shapes:
        if tuple(x.shape) != (rows, heads, width):
            raise ConfigError(
                f"rank {rank}: {name} has shape {list(x.shape)}; the plan gives this rank [{rows}, {heads}, {width}]"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ConfigError(
                f"rank {rank}: {name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must agree"
            )
    backend.check(a, q.dtype)
