"""context_parallel_linear_attention: one autograd function that runs any plan of states with any operator."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.algorithms import build_state_plan
from mindspeed_cp.comm.group_transport import DEFAULT_TIMEOUT, GroupTransport, checked_timeout
from mindspeed_cp.comm.groups import group_rank, group_size
from mindspeed_cp.comm.in_memory import InMemoryNetwork
from mindspeed_cp.engine.agreement import CallAgreement
from mindspeed_cp.engine.all_ranks import Stepping, run_all_ranks
from mindspeed_cp.engine.attention import check_options, check_types
from mindspeed_cp.engine.plan_cache import AnyPlan, kept_with_plan
from mindspeed_cp.engine.program_run import run_to_end
from mindspeed_cp.engine.state_run import RankStates, StateCall, backward_run, forward_run, rank_states
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.linear_attention import StateInputs, StateOperator, operator_for_device
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.states import StateConfig, StatePlan
from mindspeed_cp.schema.messages import short_repr

#: Largest beta: with a unit key, 1 - beta is an eigenvalue of the delta term, which above 2 makes states grow.
BETA_LIMIT = 2.0


def context_parallel_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor | None,
    plan: Plan | StatePlan,
    kind: str | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str | StateOperator | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    scale: float | None = None,
    batch_digest: int | None = None,
) -> Tensor:
    """Compute linear attention over all ranks of a plan, each document by itself, in a tree each path. Every rank of
    the group must call it with its own rows, and run its backward, including ranks without tokens.

    Differentiable once. States and maps are computed, kept and sent in fp32, with rows of fp64 in fp64. The backward
    computes the forward of the rank again; what other ranks sent is kept. :class:`mindspeed_cp.plan.states.StateConfig`
    has the formulas.

    Args:
        q, k: rows of this rank in ``plan.batch_layout``, [t, key_heads, head_dim]; after convolution and normalization.
        v: [t, heads, head_dim_v].
        gate: log of the decay, at most 0: [t, heads]; kda: [t, heads, head_dim]; lightning: also [heads].
        beta: write strength, [t, heads], of kinds with a delta term from 0 to 2, of others 0 or more, or None, which is
            1. Mamba2's step width is beta, and times its A the gate.
        plan: from :func:`mindspeed_cp.build_state_plan`; or a Plan, for whose batch layout it is then built once, with
            the schedule that is fastest by the cost model. The same on every rank; every call compares it.
        kind: "gated_delta", "kda", "lightning" or "mamba2".
        group: context-parallel ranks; default: all processes.
        backend: "torch" (chunks, on any device), "fla" (fla-core, on GPUs), or an operator; default: by device.
        timeout: seconds to wait for a peer in one transfer, on gloo.
        scale: factor of the output; default: that of the plan, or of `StateConfig`.
        batch_digest: as for :func:`mindspeed_cp.context_parallel_attention`.

    Returns:
        [t, heads, head_dim_v] of the type of v.

    Raises:
        ConfigError: a shape, a type, the group or the backend does not fit the plan; on the CPU also a gate or beta
            outside its domain, for which a device would have to wait; or ranks run different plans.
        PeerError: a peer died or did not answer in time.
    """
    check_types(q, k, v)
    check_options(True, batch_digest)
    if kind is None:
        kind = plan.state.kind if isinstance(plan, StatePlan) else "gated_delta"
    config = _checked_config(q, k, v, kind, scale)
    states = state_plan_of(plan, config)
    ranks = group_size(group)
    if ranks != states.ranks:
        valid = "only the group's own ranks call it" if ranks < 0 else "build the plan for the group's size"
        raise ConfigError(f"the plan is for {states.ranks} ranks, but the group has {max(ranks, 0)}; {valid}")
    operator = operator_for_device(q.device.type, backend)
    context = rank_states(states, group_rank(group) if ranks > 1 else 0, q.device)
    x = checked_inputs(q, k, v, gate, beta, context, operator)
    transport = agreement = None
    if ranks > 1:
        transport, agreement = bind_group(states, group, timeout, q.device)
        types = [None if each is None else str(each.dtype) for each in (x.v, x.gate, x.beta)]
        agreement.check(states, q.dtype, batch_digest=batch_digest, types_of_v_gate_beta=types)
    return _LinearAttention.apply(*x, StateCall(context, operator, transport, agreement))


def bind_group(
    plan: AnyPlan, group: dist.ProcessGroup | None, timeout: float, device: torch.device
) -> tuple[GroupTransport, CallAgreement]:
    """Return the transport of a group and the comparison of calls over it; later calls with the same arguments return
    the same objects, as long as the plan lives."""
    key = "group", group if group is not None else dist.group.WORLD, checked_timeout(timeout), device

    def bind() -> tuple[GroupTransport, CallAgreement]:
        return GroupTransport(group, timeout, device), CallAgreement(group, timeout, device)

    return kept_with_plan(plan, key, bind)


def state_plan_of(plan: Plan | StatePlan, config: StateConfig) -> StatePlan:
    """Return a plan of states: the given one, or one for the batch layout of a Plan, which is kept beside it.

    Raises:
        ConfigError: it is neither, or for another linear attention.
    """
    if isinstance(plan, Plan):
        key = "states", config
        return kept_with_plan(plan, key, lambda: build_state_plan(plan.batch_layout, config, plan.topology))
    if not isinstance(plan, StatePlan):
        raise ConfigError(f"plan is {short_repr(plan)}; valid: a StatePlan, from build_state_plan, or a Plan")
    wanted = plan.state if config.scale is not None else replace(plan.state, scale=None)
    names = [each.name for each in fields(config) if getattr(config, each.name) != getattr(wanted, each.name)]
    if names:
        both = (", ".join(f"{name} {getattr(each, name)}" for name in names) for each in (config, plan.state))
        raise ConfigError("the tensors and arguments have {}, the plan {}; valid: a plan for them".format(*both))
    return plan


def _checked_config(q: Tensor, k: Tensor, v: Tensor, kind: str, scale: float | None) -> StateConfig:
    """Return the linear attention that tensors are for."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ConfigError(f"{name} has shape {list(x.shape)}; valid: [rows, heads, channels]")
    if q.shape != k.shape:
        raise ConfigError(f"k has shape {list(k.shape)}; valid: that of q, {list(q.shape)}")
    if q.shape[1] and v.shape[1] % q.shape[1]:
        raise ConfigError(f"v has {v.shape[1]} heads, q and k have {q.shape[1]}; valid: a multiple of these")
    return StateConfig(kind, v.shape[1], q.shape[2], v.shape[2], q.shape[1], scale)


def checked_inputs(
    q: Tensor, k: Tensor, v: Tensor, gate: object, beta: object, context: RankStates, operator: StateOperator
) -> StateInputs:
    """Check the tensors of one rank against its plan and operator, and return them with all heads each."""
    state, rank = context.state, context.rank
    if len(q) != context.rows or len(v) != context.rows:
        raise ConfigError(
            f"rank {rank}: q and v have {len(q)} and {len(v)} rows; the plan gives this rank {context.rows} (is it a "
            "plan of another batch?)"
        )
    shape = (context.rows, state.heads)
    shapes: dict[str, list[tuple[int, ...]]] = {"gate": [shape], "beta": [shape]}
    if state.has_channel_gates:
        shapes["gate"] = [(*shape, state.head_dim)]
    if state.kind == "lightning":
        shapes["gate"].append((state.heads,))
    for name, x in (("gate", gate), ("beta", beta)):
        if x is None and name == "beta" and not state.has_delta:
            continue
        if not isinstance(x, Tensor) or tuple(x.shape) not in shapes[name]:
            shown = list(x.shape) if isinstance(x, Tensor) else short_repr(x)
            valid = " or ".join(str(list(valid)) for valid in shapes[name])
            raise ConfigError(f"rank {rank}: {name} is {shown}; valid: a tensor of shape {valid} for kind {state.kind}")
    assert isinstance(gate, Tensor) and (beta is None or isinstance(beta, Tensor))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ConfigError(
                f"rank {rank}: {name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}; valid: alike"
            )
    most = BETA_LIMIT if state.has_delta else float("inf")
    for name, values, low, high in (("gate", gate, -float("inf"), 0.0), ("beta", beta, 0.0, most)):
        if values is None:
            continue
        if not values.is_floating_point() or values.device != q.device:
            raise ConfigError(f"rank {rank}: {name} is {values.dtype} on {values.device}; valid: fp32 on {q.device}")
        if values.device.type == "cpu" and not bool((values.isfinite() & (values >= low) & (values <= high)).all()):
            domain = f"from 0 to {high:g}" if state.has_delta else "finite, 0 or more"
            domain = "finite logs of decays, at most 0" if name == "gate" else domain
            wrong = values[~(values.isfinite() & (values >= low) & (values <= high))][0].item()
            raise ConfigError(f"rank {rank}: {name} has the value {wrong}; valid: {domain}")
    operator.check(state, q.dtype, q.device)
    if state.heads > state.key_heads:
        q, k = (x.repeat_interleave(state.heads // state.key_heads, 1) for x in (q, k))
    return StateInputs(q, k, v, gate.expand(shape) if gate.dim() == 1 else gate, beta)


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None, call: StateCall
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, saved = run_to_end(forward_run(call, StateInputs(q, k, v, gate, beta)))
        ctx.save_for_backward(*saved)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call.agreement is not None:
            ctx.call.agreement.read_finished()
        with torch.autocast(dout.device.type, enabled=False):
            return *run_to_end(backward_run(ctx.call, dout, ctx.saved_tensors)), None


@dataclass(frozen=True)
class WholeStates:
    """Output and gradients of the whole batch, of the shapes of the inputs; gradients are None without `dout`.

    Attributes:
        out: [tokens, heads, head_dim_v].
        gradients: of q, k, v, gate and beta.
    """

    out: Tensor
    gradients: StateInputs | None


@torch.no_grad()
def linear_attention_in_process(
    plan: StatePlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor | None,
    dout: Tensor | None = None,
    backend: str | StateOperator | None = None,
    stepping: Stepping | None = None,
) -> WholeStates:
    """Run all ranks of a plan on the whole batch in this process, forward and, with `dout`, backward; messages go
    through memory. Arguments as for :func:`context_parallel_linear_attention`, with rows of all tokens.

    Raises:
        ConfigError: a shape, a type or the backend does not fit the plan.
        PeerError: the plan dead-locks, or the two ends of a message do not match.
    """
    check_types(q, k, v)
    if not isinstance(plan, StatePlan):
        raise ConfigError(f"plan is {short_repr(plan)}; valid: a StatePlan, from build_state_plan")
    state_plan_of(plan, _checked_config(q, k, v, plan.state.kind, None))
    tokens = plan.layout.documents.tokens
    for name, x in (("q", q), ("v", v), ("gate", gate), ("beta", beta), ("dout", dout)):
        if x is not None and x.dim() > 1 and len(x) != tokens:
            raise ConfigError(f"{name} has {len(x)} rows; valid: those of the batch of the plan, {tokens}")
    if dout is not None and dout.shape != v.shape:
        raise ConfigError(f"dout has shape {list(dout.shape)}; valid: that of v, {list(v.shape)}")
    operator, layout, stepping = operator_for_device(q.device.type, backend), plan.layout, stepping or Stepping()
    calls, inputs = [], []
    for rank in range(plan.ranks):
        context = rank_states(plan, rank, q.device)
        own = [None if x is None else x if x.dim() == 1 else layout.shard(x, rank) for x in (q, k, v, gate, beta)]
        inputs.append(checked_inputs(*own, context=context, operator=operator))  # type: ignore[arg-type, misc]
        calls.append(StateCall(context, operator, None))
    network = InMemoryNetwork(plan.ranks, stepping.lazy)
    over = [replace(call, transport=network.transport(rank)) for rank, call in enumerate(calls)]
    results = run_all_ranks([forward_run(call, x) for call, x in zip(over, inputs, strict=True)], network, stepping)
    out = layout.unshard([out for out, _ in results])
    if dout is None:
        return WholeStates(out, None)
    runs = [
        backward_run(call, layout.shard(dout, rank), saved)
        for rank, (call, (_, saved)) in enumerate(zip(over, results, strict=True))
    ]
    of_ranks = run_all_ranks(runs, network, stepping)
    whole: list[Any] = [None if xs[0] is None else layout.unshard(xs) for xs in zip(*of_ranks, strict=True)]
    repeats = plan.state.heads // plan.state.key_heads
    whole[:2] = (x.unflatten(1, (-1, repeats)).sum(2) for x in whole[:2])  # of the heads that were given
    return WholeStates(out, StateInputs(*whole))
