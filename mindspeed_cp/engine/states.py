"""context_parallel_linear_attention: one autograd function that runs any plan of states with any operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.algorithms.states import build_state_plan
from mindspeed_cp.comm import (
    DEFAULT_TIMEOUT,
    GroupTransport,
    InMemoryNetwork,
    RankRedistribution,
    Transfer,
    Transport,
    checked_timeout,
    group_rank,
    group_size,
    rank_redistribution,
)
from mindspeed_cp.engine.agreement import CallAgreement
from mindspeed_cp.engine.all_ranks import Stepping, run_all_ranks
from mindspeed_cp.engine.attention import check_options, check_types
from mindspeed_cp.engine.plan_cache import AnyPlan, kept_with_plan
from mindspeed_cp.engine.profile_ranges import profile_range
from mindspeed_cp.engine.program_run import Run, redistribute, run_to_end
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.linear_attention import SegmentTable, StateInputs, StateOperator, operator_for_device
from mindspeed_cp.ops.linear_attention.contract import state_dtype
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.states import ADD, COMPOSE, MAP, PULL, STATE, StateConfig, StatePlan, StateProgram
from mindspeed_cp.schema.messages import short_repr

#: Largest beta: with a unit key, 1 - beta is an eigenvalue of the delta term, which above 2 makes states grow.
MOST_BETA = 2.0


class Register(NamedTuple):
    """An affine map of states, or a state alone: [heads, head_dim, head_dim] or [heads, 1, 1], and [heads, head_dim_v,
    head_dim]; None where it has none."""

    map: Tensor | None
    state: Tensor | None


@dataclass(frozen=True)
class Parcel:
    """What goes to a peer in a step, or comes from it: (register, parts), one after the other in one message."""

    peer: int
    registers: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class RankStateStep:
    """Work of one rank in one step of a program.

    Attributes:
        number: step of the program.
        sends, receives: one parcel for each peer.
        operations: (kind, a, b, out).
        dropped: registers that nothing reads after this step.
    """

    number: int
    sends: Sequence[Parcel]
    receives: Sequence[Parcel]
    operations: Sequence[tuple[int, int, int, int]]
    dropped: Sequence[int]


class RankStates:
    """One rank of a plan of states on a device. It is cached beside the plan and does not refer to it.

    Attributes:
        rank: context-parallel rank.
        state: linear attention.
        rows: rows of the caller.
        computed: rows and heads during the computation.
        table: segments of the rank.
        first: number of the rank's first segment in the plan.
        steps: by direction, the steps in which the rank does something.
        results: by direction, the registers with S_in of `table.entered`, or dS_out of `table.carried`.
        kept: registers of the forward whose maps the backward reads.
        gradients: registers of R of `table.entered`.
        inward, outward: redistributions to the layout of the computation and back; None between equal ones.
    """

    def __init__(self, plan: StatePlan, rank: int, device: torch.device) -> None:
        first, last = plan.segment_offsets[rank : rank + 2].tolist()
        segments, carried = plan.segments[first:last], plan.carried[first:last]
        is_entered = segments["before"] >= 0
        self.rank, self.state, self.first = rank, plan.state, first
        self.rows = int(plan.layout.token_counts[rank])
        self.computed = (
            int(plan.compute_layout.token_counts[rank]),
            int(plan.compute_layout.head_counts(plan.state.heads)[rank]),
        )
        self.table = SegmentTable(
            segments["stop"] - segments["start"],
            np.flatnonzero(is_entered),
            np.flatnonzero(carried),
            np.flatnonzero(carried & is_entered),
            device,
        )
        self.results = {
            "forward": plan.forward.results[first:last][is_entered].tolist(),
            "backward": plan.backward.results[first:last][carried].tolist(),
        }
        self.gradients = (plan.forward.registers + first + self.table.entered).tolist()
        self.kept = _maps_read(plan.backward, rank, plan.forward.registers)
        self.steps = {
            "forward": _rank_steps(plan.forward, rank, {*self.results["forward"], *self.kept}),
            "backward": _rank_steps(plan.backward, rank, set(self.results["backward"])),
        }
        moved = plan.redistribution
        self.inward = self.outward = None
        if moved is not None:
            self.inward, self.outward = (rank_redistribution(moved, rank, device, adjoint=back) for back in (False, True))

    @property
    def is_idle(self) -> bool:
        """True if the rank has no rows or no heads: it computes nothing, and no state passes through it."""
        return 0 in self.computed


def _maps_read(program: StateProgram, rank: int, registers: int) -> list[int]:
    """Return the registers below `registers` whose maps a rank of a backward reads, or sends."""
    operations, messages = program.operations, program.messages
    pulled = operations["b"][(operations["rank"] == rank) & (operations["kind"] == PULL)]
    sent = messages["source"][(messages["src"] == rank) & (messages["parts"] & MAP > 0)]
    received = messages["target"][messages["dst"] == rank]
    registers_read = np.setdiff1d(np.concatenate([pulled, sent]), received)
    return registers_read[registers_read < registers].tolist()


def _rank_steps(program: StateProgram, rank: int, results: set[int]) -> list[RankStateStep]:
    messages, operations = program.messages, program.operations
    messages = messages[(messages["src"] == rank) | (messages["dst"] == rank)]
    operations = operations[operations["rank"] == rank]
    last_read: dict[int, int] = {}
    for step, register in [
        *zip(operations["step"].tolist(), operations["a"].tolist(), strict=True),
        *zip(operations["step"].tolist(), operations["b"].tolist(), strict=True),
        *((int(m["step"]), int(m["source"])) for m in messages if m["src"] == rank),
    ]:
        last_read[register] = max(step, last_read.get(register, -1))
    steps = []
    for step in np.union1d(messages["step"], operations["step"]).tolist():
        parcels: dict[tuple[bool, int], list[tuple[int, int]]] = {}
        for _, src, dst, source, target, parts in messages[messages["step"] == step].tolist():
            key = (True, dst) if src == rank else (False, src)
            parcels.setdefault(key, []).append((source if src == rank else target, parts))
        sends, receives = (
            [Parcel(peer, registers) for (is_sent, peer), registers in parcels.items() if is_sent == side]
            for side in (True, False)
        )
        own = operations[operations["step"] == step][["kind", "a", "b", "out"]].tolist()
        dropped = [r for r, last in last_read.items() if last == step and r not in results and r >= 0]
        steps.append(RankStateStep(step, sends, receives, own, dropped))
    return steps


@dataclass(frozen=True)
class StateCall:
    """Context that the forward and the backward of one call share on one rank.

    Attributes:
        context: this rank of the plan.
        operator: operator of linear attention.
        transport: transport to the other ranks; None for a single rank.
        agreement: comparison of calls with those of other ranks; None for a single rank, and without a process group.
    """

    context: RankStates
    operator: StateOperator
    transport: Transport | None
    agreement: CallAgreement | None = None


def context_parallel_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor | None,
    plan: Plan | StatePlan,
    kind: str = "gated_delta",
    group: dist.ProcessGroup | None = None,
    backend: str | StateOperator | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    scale: float | None = None,
    batch_digest: int | None = None,
) -> Tensor:
    """Compute linear attention over all ranks of a plan, each document by itself, in a tree each path. Every rank of the
    group must call it with its own rows, and run its backward, including ranks without tokens.

    Differentiable once. States and maps are computed, kept and sent in fp32, with rows of fp64 in fp64. The backward
    computes the forward of the rank again; what other ranks sent is kept. :class:`mindspeed_cp.plan.states.StateConfig`
    has the formulas.

    Args:
        q, k: rows of this rank in ``plan.batch_layout``, [t, key_heads, head_dim]; after convolution and normalization.
        v: [t, heads, head_dim_v].
        gate: log of the decay, at most 0: [t, heads]; kda: [t, heads, head_dim]; lightning: also [heads].
        beta: write strength, [t, heads], from 0 to 2; kinds without a delta term also take None, which is 1. Mamba2's
            step width is beta, and times its A the gate.
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
        agreement.check(states, q.dtype, batch_digest=batch_digest)
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
    if config != wanted:
        raise ConfigError(f"the tensors are for {config}, the plan is for {plan.state}; valid: a plan for the tensors")
    return plan


def rank_states(plan: StatePlan, rank: int, device: torch.device) -> RankStates:
    """Return the context of a rank. The first call builds it; it is kept as long as the plan lives."""
    return kept_with_plan(plan, ("rank", rank, device), lambda: RankStates(plan, rank, device))


def _checked_config(q: Tensor, k: Tensor, v: Tensor, kind: str, scale: float | None) -> StateConfig:
    """Return the linear attention that tensors are for."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ConfigError(f"{name} has shape {list(x.shape)}; valid: [rows, heads, channels]")
    if q.shape != k.shape:
        raise ConfigError(f"k has shape {list(k.shape)}; valid: that of q, {list(q.shape)}")
    return StateConfig(kind, v.shape[1], q.shape[2], v.shape[2], q.shape[1], scale)


def checked_inputs(
    q: Tensor, k: Tensor, v: Tensor, gate: object, beta: object, context: RankStates, operator: StateOperator
) -> StateInputs:
    """Check the tensors of one rank against its plan and operator, and return them with all heads each."""
    state, rank = context.state, context.rank
    shape = (context.rows, state.heads)
    shapes = {"gate": [(*shape, state.head_dim) if state.has_channel_gates else shape], "beta": [shape]}
    if state.kind == "lightning":
        shapes["gate"].append((state.heads,))
    for name, x in (("gate", gate), ("beta", beta)):
        if x is None and name == "beta" and not state.has_delta:
            continue
        if not isinstance(x, Tensor) or tuple(x.shape) not in shapes[name]:
            shown = list(x.shape) if isinstance(x, Tensor) else short_repr(x)
            valid = " or ".join(str(list(valid)) for valid in shapes[name])
            raise ConfigError(f"rank {rank}: {name} is {shown}; valid: a tensor of shape {valid} for kind {state.kind}")
    if len(q) != context.rows or len(v) != context.rows:
        raise ConfigError(
            f"rank {rank}: q and v have {len(q)} and {len(v)} rows; the plan gives this rank {context.rows} (is it a "
            "plan of another batch?)"
        )
    assert isinstance(gate, Tensor) and (beta is None or isinstance(beta, Tensor))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ConfigError(
                f"rank {rank}: {name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}; valid: alike"
            )
    for name, values, low, high in (("gate", gate, -float("inf"), 0.0), ("beta", beta, 0.0, MOST_BETA)):
        if values is None:
            continue
        if not values.is_floating_point() or values.device != q.device:
            raise ConfigError(f"rank {rank}: {name} is {values.dtype} on {values.device}; valid: fp32 on {q.device}")
        if values.device.type == "cpu" and not bool((values.isfinite() & (values >= low) & (values <= high)).all()):
            domain = "finite logs of decays, at most 0" if name == "gate" else f"from 0 to {high:g}"
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


INPUTS = len(StateInputs._fields)


def forward_run(call: StateCall, x: StateInputs) -> Run[tuple[Tensor, Sequence[Tensor | None]]]:
    """Run the forward of one rank. Returns its output, and what to save for the backward: the inputs in the layout of
    the computation, S_in, and maps that the backward reads."""
    context, operator = call.context, call.operator
    x = StateInputs(*(yield from _moved(x, context.inward, call.transport, "rows of linear attention")))
    entering = _no_states(context, x.v)
    maps: list[Tensor] = []
    if context.is_idle:
        out = x.v.new_zeros((*context.computed, context.state.head_dim_v))
    else:
        table = context.table
        with profile_range("linear attention"):
            prepared = operator.prepare(x, context.state, table)
            registers = _local_maps(context, *operator.maps(prepared)) if len(table.carried) else {}
        yield from _run_steps(context, "forward", registers, entering, call.transport)
        entering = _stacked(registers, context.results["forward"], entering)
        maps = [_map(registers, register) for register in context.kept]
        with profile_range("linear attention"):
            out, _ = operator.run(prepared, entering)
        del prepared
    (out,) = yield from _moved((out,), context.outward, call.transport, "outputs of linear attention")
    return out, [*x, entering, *maps]


def backward_run(call: StateCall, dout: Tensor, saved: Sequence[Any]) -> Run[list[Tensor | None]]:
    """Run the backward of one rank. Returns the gradients of the inputs."""
    context, operator = call.context, call.operator
    inputs, (entering, *maps) = StateInputs(*saved[:INPUTS]), saved[INPUTS:]
    (dout,) = yield from _moved((dout,), context.inward, call.transport, "gradients of outputs")
    gradients: list[Tensor | None] = [None if x is None else torch.zeros_like(x) for x in inputs]
    if not context.is_idle:
        with torch.enable_grad(), profile_range("linear attention"):
            leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
            entering = entering.detach().requires_grad_()
            prepared = operator.prepare(StateInputs(*leaves), context.state, context.table)  # type: ignore[arg-type]
            out, last = operator.run(prepared, entering)
        del prepared
        registers = {register: Register(x, None) for register, x in zip(context.kept, maps, strict=True)}
        if context.gradients:
            with profile_range("linear attention"):
                (through,) = torch.autograd.grad(out, entering, dout.to(out.dtype), retain_graph=True)
            registers |= {r: Register(None, x) for r, x in zip(context.gradients, through, strict=True)}
        yield from _run_steps(context, "backward", registers, entering, call.transport)
        leaving = _stacked(registers, context.results["backward"], entering.detach())
        with profile_range("linear attention"):
            ends = [(out, dout.to(out.dtype)), *([(last, leaving)] if len(leaving) else [])]
            given = [leaf for leaf in leaves if leaf is not None]
            values = torch.autograd.grad([x for x, _ in ends], given, [x for _, x in ends], allow_unused=True)
        by_leaf = iter(values)
        gradients = [
            None if leaf is None else zero if (value := next(by_leaf)) is None else value
            for leaf, zero in zip(leaves, gradients, strict=True)
        ]
        del out, last
    return list((yield from _moved(gradients, context.outward, call.transport, "gradients of rows")))


def _moved(
    tensors: Sequence[Tensor | None], redistribution: RankRedistribution | None, transport: Transport | None, label: str
) -> Run[list[Tensor | None]]:
    """Move rows of any number of dimensions between the layouts of the caller and of the computation."""
    if redistribution is None:
        return list(tensors)
    given = [x for x in tensors if x is not None]
    rows = [(x if x.dim() == 3 else x.unsqueeze(-1)).contiguous() for x in given]
    moved = yield from redistribute(rows, [redistribution] * len(rows), transport, label)
    outputs = iter(out if x.dim() == 3 else out.squeeze(-1) for out, x in zip(moved, given, strict=True))
    return [None if x is None else next(outputs) for x in tensors]


def _no_states(context: RankStates, like: Tensor) -> Tensor:
    state, heads = context.state, context.computed[1]
    return like.new_empty((0, heads, state.head_dim_v, state.head_dim), dtype=state_dtype(like.dtype))


def _local_maps(context: RankStates, maps: Tensor, states: Tensor) -> dict[int, Register]:
    """Return the registers of the rank's own segments."""
    by_segment = dict(zip(context.table.mapped.tolist(), maps, strict=True))
    carried = context.table.carried.tolist()
    return {context.first + s: Register(by_segment.get(s), x) for s, x in zip(carried, states, strict=True)}


def _stacked(registers: dict[int, Register], numbers: Sequence[int], none: Tensor) -> Tensor:
    """Return the states of registers, [n, heads, head_dim_v, head_dim]."""
    states = [registers[number].state for number in numbers]
    return torch.stack(states) if states else none[:0]  # type: ignore[arg-type]


def _map(registers: dict[int, Register], number: int) -> Tensor:
    value = registers[number].map
    assert value is not None, "the plan reads a map that is not there"
    return value


def _state(registers: dict[int, Register], number: int) -> Tensor:
    value = registers[number].state
    assert value is not None, "the plan reads a state that is not there"
    return value


def _run_steps(
    context: RankStates, direction: str, registers: dict[int, Register], like: Tensor, transport: Transport | None
) -> Run[None]:
    """Run a program on the registers of a rank: in each step post its messages, wait for them, and compute.

    Raises:
        PeerError: a peer died or did not answer in time.
    """
    state, heads = context.state, like.shape[1]
    shapes = {STATE: (heads, state.head_dim_v, state.head_dim), MAP: (heads, *((state.head_dim,) * 2))}
    if not state.has_delta:
        shapes[MAP] = (heads, 1, 1)
    sizes = {part: int(np.prod(shape)) for part, shape in shapes.items()}
    label = "states" if direction == "forward" else "gradients of states"
    for step in context.steps[direction]:
        transfers: list[Transfer] = []
        for parcel in step.sends:
            parts = [x.reshape(-1) for register, wanted in parcel.registers
                     for part, x in ((STATE, registers[register].state), (MAP, registers[register].map))
                     if wanted & part and x is not None]  # fmt: skip
            buffer = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
            transfers.append(Transfer(buffer, parcel.peer, True, step.number, f"{label}, step {step.number}"))
        for parcel in step.receives:
            size = sum(sizes[part] for _, wanted in parcel.registers for part in sizes if wanted & part)
            transfers.append(
                Transfer(like.new_empty(size), parcel.peer, False, step.number, f"{label}, step {step.number}")
            )
        if transfers:
            assert transport is not None, "a plan for a single rank has no messages"
            with profile_range("post messages"):
                pending = transport.post(transfers)
            yield pending
            with profile_range("wait for messages"):
                for transfer in pending:
                    transfer.wait()
        for parcel, transfer in zip(step.receives, transfers[len(step.sends) :], strict=True):
            _unpack(registers, parcel, transfer.tensor, shapes, sizes)
        for operation in step.operations:
            _operate(registers, state.has_delta, *operation)
        for register in step.dropped:
            registers.pop(register, None)


def _unpack(
    registers: dict[int, Register],
    parcel: Parcel,
    buffer: Tensor,
    shapes: dict[int, tuple[int, ...]],
    sizes: dict[int, int],
) -> None:
    """Put what arrived into registers, as views of the message."""
    begin = 0
    for register, wanted in parcel.registers:
        values: dict[int, Tensor] = {}
        for part in (STATE, MAP):
            if wanted & part:
                values[part] = buffer[begin : begin + sizes[part]].view(shapes[part])
                begin += sizes[part]
        registers[register] = Register(values.get(MAP), values.get(STATE))


def _operate(registers: dict[int, Register], has_delta: bool, kind: int, a: int, b: int, out: int) -> None:
    """Run one operation (:mod:`mindspeed_cp.plan.states`)."""
    old, state = registers.get(out, Register(None, None)), _state(registers, a)
    if kind == COMPOSE:
        passed, after, first = _map(registers, b), _state(registers, b), registers[a].map
        if has_delta:
            both = None if first is None else first @ passed
            registers[out] = Register(both, torch.baddbmm(after, state, passed))
        else:
            registers[out] = Register(None if first is None else first * passed, state * passed + after)
        return
    if kind == PULL:
        passed = _map(registers, b)
        state = state @ passed.mT if has_delta else state * passed
    else:
        assert kind == ADD
    registers[out] = Register(old.map, state if old.state is None else old.state + state)


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
    through memory. Arguments as for :func:`context_parallel_linear_attention`, with rows of all tokens, and as many
    heads of q and k as of v.

    Raises:
        ConfigError: a shape, a type or the backend does not fit the plan.
        PeerError: the plan dead-locks, or the two ends of a message do not match.
    """
    operator, layout, stepping = operator_for_device(q.device.type, backend), plan.layout, stepping or Stepping()
    calls, inputs = [], []
    for rank in range(plan.ranks):
        context = rank_states(plan, rank, q.device)
        own = [None if x is None else x if x.dim() == 1 else layout.shard(x, rank) for x in (q, k, v, gate, beta)]
        inputs.append(checked_inputs(*own, context, operator))  # type: ignore[arg-type]
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
    whole = [None if xs[0] is None else layout.unshard(xs) for xs in zip(*of_ranks, strict=True)]
    return WholeStates(out, StateInputs(*whole))
