"""Runs a plan of states on one rank: registers of maps and states, the messages of each step, and the operator.

As in :mod:`mindspeed_cp.engine.program_run`, a computation is a generator that yields the transfers that it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.comm.group_transport import Transfer, Transport
from mindspeed_cp.comm.redistribution import RankRedistribution, rank_redistribution
from mindspeed_cp.engine.agreement import CallAgreement
from mindspeed_cp.engine.plan_cache import kept_with_plan
from mindspeed_cp.engine.profile_ranges import profile_range
from mindspeed_cp.engine.program_run import Run, redistribute
from mindspeed_cp.ops.linear_attention import SegmentTable, StateInputs, StateOperator
from mindspeed_cp.ops.linear_attention.contract import state_dtype
from mindspeed_cp.plan.states import ADD, COMPOSE, MAP, PULL, STATE, StatePlan, StateProgram


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
        self.inward: RankRedistribution | None = None
        self.outward: RankRedistribution | None = None
        if moved is not None:
            self.inward = rank_redistribution(moved, rank, device)
            self.outward = rank_redistribution(moved, rank, device, adjoint=True)

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


def rank_states(plan: StatePlan, rank: int, device: torch.device) -> RankStates:
    """Return the context of a rank. The first call builds it; it is kept as long as the plan lives."""
    return kept_with_plan(plan, ("rank", rank, device), lambda: RankStates(plan, rank, device))


INPUTS = len(StateInputs._fields)


def forward_run(call: StateCall, x: StateInputs) -> Run[tuple[Tensor, Sequence[Tensor | None]]]:
    """Run the forward of one rank. Returns its output, and what to save for the backward: the inputs in the layout of
    the computation, S_in, and maps that the backward reads."""
    context, operator = call.context, call.operator
    moved = yield from _moved(x, context.inward, call.transport, "rows of linear attention")
    x = StateInputs(*moved)  # type: ignore[arg-type]
    entering = _no_states(context, x.v)
    maps: list[Tensor] = []
    if context.is_idle:
        out = x.v.new_zeros((*context.computed, context.state.head_dim_v))
    else:
        registers: dict[int, Register] = {}
        with profile_range("linear attention"):
            prepared = operator.prepare(x, context.state, context.table)
            if not len(context.table.entered):  # outputs wait for nothing, and S_out comes with them
                out, states = operator.run(prepared, entering)
                registers = _local_maps(context, states[:0], states)
            elif len(context.table.carried):
                registers = _local_maps(context, *operator.maps(prepared))
        yield from _run_steps(context, "forward", registers, entering, call.transport)
        maps = [_map(registers, register) for register in context.kept]
        if len(context.table.entered):
            entering = _stacked(registers, context.results["forward"], entering)
            with profile_range("linear attention"):
                out, _ = operator.run(prepared, entering)
        del prepared
    outputs = yield from _moved((out,), context.outward, call.transport, "outputs of linear attention")
    assert outputs[0] is not None
    return outputs[0], [*x, entering, *maps]


def backward_run(call: StateCall, dout: Tensor, saved: Sequence[Any]) -> Run[list[Tensor | None]]:
    """Run the backward of one rank. Returns the gradients of the inputs."""
    context, operator = call.context, call.operator
    inputs, (entering, *maps) = StateInputs(*saved[:INPUTS]), saved[INPUTS:]
    moved = yield from _moved((dout,), context.inward, call.transport, "gradients of outputs")
    assert moved[0] is not None
    dout = moved[0]
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
    return (yield from _moved(gradients, context.outward, call.transport, "gradients of rows"))


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
    square = (state.head_dim, state.head_dim) if state.has_delta else (1, 1)
    shapes = {STATE: (heads, state.head_dim_v, state.head_dim), MAP: (heads, *square)}
    sizes = {part: prod(shape) for part, shape in shapes.items()}
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
                for waited_for in pending:
                    waited_for.wait()
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
    shapes: Mapping[int, tuple[int, ...]],
    sizes: Mapping[int, int],
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
