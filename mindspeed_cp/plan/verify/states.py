"""verify_state_plan: the proof that a plan of states computes S_in and dS_out of every segment, and can be run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout import Documents, Layout, ragged_arange
from mindspeed_cp.plan.problem import Topology
from mindspeed_cp.plan.states import (
    ADD,
    COMPOSE,
    MAP,
    PULL,
    SEGMENT,
    STATE,
    STATE_MESSAGE,
    STATE_OPERATION,
    StateConfig,
    StatePlan,
    StateProgram,
)
from mindspeed_cp.schema.messages import short_repr

KIND_NAMES = {COMPOSE: "compose", ADD: "add", PULL: "pull"}


def verify_state_plan(plan: StatePlan) -> None:
    """Prove that a plan of states computes linear attention over whole documents and can run, or raise.

    Proved for all ranks, forward and backward:

    * every (token, head) is held once by the caller's layout and once by that of the computation; segments are the rows
      of the latter, in order; `before` of each is the segment that ends with the token before it, on its path in a
      tree, with the same heads;
    * every number refers to a step, rank and register that exists; messages and operations ascend in steps, so that
      a rank waits only for what others have posted, whatever they wait for;
    * the programs run on random affine maps of 2 x 2 matrices of integers modulo 2**64 in place of states: S_in of
      every segment is the product of the maps along its path, dS_out the sum over all continuations, each exactly once
      and in the right order. A wrong program passes with a probability below 1e-18;
    * no register is read before it is written, or written again, or loses a map that is read later; nothing is sent or
      computed that nobody reads.

    Raises:
        PlanError: names the segment, or the direction, step, rank and register.
        ConfigError: the argument is not a StatePlan.
    """
    if not isinstance(plan, StatePlan):
        raise ConfigError(f"plan is {short_repr(plan)}; valid: a StatePlan, from build_state_plan")
    _check_fields(plan)
    _check_layouts(plan)
    _check_segments(plan)
    for direction in ("forward", "backward"):
        _check_program(plan, getattr(plan, direction), direction)
    _prove(plan)


def _check_fields(plan: StatePlan) -> None:
    for name, kind in (
        ("state", StateConfig),
        ("topology", Topology),
        ("layout", Layout),
        ("compute_layout", Layout),
        ("forward", StateProgram),
        ("backward", StateProgram),
    ):
        if not isinstance(getattr(plan, name), kind):
            raise PlanError(f"{name} is {short_repr(getattr(plan, name))}; valid: a {kind.__name__}")
    tables = [("segments", plan.segments, SEGMENT)]
    for direction in ("forward", "backward"):
        program: StateProgram = getattr(plan, direction)
        tables += [
            (f"{direction}.messages", program.messages, STATE_MESSAGE),
            (f"{direction}.operations", program.operations, STATE_OPERATION),
            (f"{direction}.results", program.results, np.dtype(np.int64)),
        ]
    for name, table, dtype in tables:
        if not isinstance(table, np.ndarray) or table.dtype != dtype or table.ndim != 1:
            raise PlanError(f"{name} is {short_repr(table)}; valid: an array [n] of {dtype}")


def _check_layouts(plan: StatePlan) -> None:
    layout, computed = plan.layout, plan.compute_layout
    if not layout.ranks == computed.ranks == plan.topology.ranks:
        raise PlanError(
            f"the layouts are for {layout.ranks} and {computed.ranks} ranks, the topology has {plan.topology.ranks}"
        )
    if layout.documents != computed.documents:
        raise PlanError("layout and compute_layout have different documents")
    if layout.heads is not None:
        raise PlanError("layout splits heads; the caller's rows have all heads")
    layout.check()
    computed.check(plan.state.heads)


def _tokens_before(documents: Documents) -> np.ndarray:
    """Return the token whose state enters each token, -1: none, int64 [tokens]."""
    before = np.arange(-1, documents.tokens - 1)
    ends: list[int] = []  # last token of the path to each document
    parents = [-1] * len(documents) if documents.trees is None else documents.trees.parents.tolist()
    offsets = documents.offsets.tolist()
    for parent, start, stop in zip(parents, offsets[:-1], offsets[1:], strict=True):
        end = ends[parent] if parent >= 0 else -1
        if stop > start:
            before[start] = end
        ends.append(stop - 1 if stop > start else end)
    return before


def _check_segments(plan: StatePlan) -> None:
    segments, computed = plan.segments, plan.compute_layout
    rank, start, stop, before = (segments[name] for name in ("rank", "start", "stop", "before"))
    if (np.diff(rank) < 0).any() or not ((rank >= 0) & (rank < plan.ranks)).all() or not (stop > start).all():
        raise PlanError("segments: they are not in the order of ranks, or a rank does not exist, or one is empty")
    if not ((before >= -1) & (before < len(segments))).all():
        raise PlanError("segments: `before` names a segment that does not exist")
    tokens = ragged_arange(start, stop - start)
    wanted = np.concatenate([np.zeros(0, np.int64), *(computed.tokens(r) for r in range(plan.ranks))])
    counts = np.bincount(rank, stop - start, plan.ranks)
    if not np.array_equal(tokens, wanted) or not np.array_equal(counts, computed.token_counts):
        raise PlanError("segments: their tokens are not the rows of compute_layout, rank by rank in ascending order")
    entering, documents = _tokens_before(plan.documents), plan.documents
    if any((documents.document_of(token) != segments["doc"]).any() for token in (start, stop - 1)):
        raise PlanError("segments: a segment is not of its document")
    expected = entering[start]
    heads = computed.head_bounds(plan.state.heads)
    same_heads = (heads[rank[before]] == heads[rank]).all(1)
    right = np.where(before < 0, expected < 0, (stop[before] - 1 == expected) & (expected >= 0) & same_heads)
    if not right.all():
        wrong = int(np.flatnonzero(~right)[0])
        raise PlanError(
            f"segment {wrong} (rank {rank[wrong]}, tokens {start[wrong]} to {stop[wrong] - 1}): `before` is "
            f"{before[wrong]}, but the state that enters it is that after token {expected[wrong]}, of the same heads"
        )


def _check_program(plan: StatePlan, program: StateProgram, direction: str) -> None:
    limits = {"src": plan.ranks, "dst": plan.ranks, "rank": plan.ranks, "parts": (STATE | MAP) + 1, "kind": PULL + 1}
    for table in (program.messages, program.operations):
        for name in table.dtype.names or ():
            low = 1 if name == "parts" else -1 if name == "b" else 0
            high = limits.get(name, np.iinfo(np.int64).max if name == "step" else program.registers)
            wrong = np.flatnonzero((table[name] < low) | (table[name] >= high))
            if len(wrong):
                raise PlanError(f"{direction}: {name} is {table[name][wrong[0]]}; valid: {low} to {high - 1}")
        if (np.diff(table["step"]) < 0).any():
            raise PlanError(f"{direction}: steps do not ascend")
    own = program.messages["src"] == program.messages["dst"]
    if own.any():
        raise PlanError(f"{direction}: rank {program.messages['src'][own][0]} sends to itself")
    if ((program.operations["b"] >= 0) != (program.operations["kind"] != ADD)).any():
        raise PlanError(f"{direction}: an operation has no second register that needs it, or one that does not read it")
    if len(program.results) != len(plan.segments):
        raise PlanError(f"{direction}: {len(program.results)} results for {len(plan.segments)} segments")
    has_result = plan.segments["before"] >= 0 if direction == "forward" else plan.carried
    wrong = np.flatnonzero((program.results >= 0) != has_result)
    if len(wrong) or (program.results >= program.registers).any() or (program.results < -1).any():
        where = f"segment {wrong[0]}" if len(wrong) else "a segment"
        raise PlanError(f"{direction}: {where} has a result that it must not have, or none, or no such register")


class _Value(NamedTuple):
    """A register: a map of integers [2, 2], and a state [1, 2]; None where it has none."""

    map: np.ndarray | None
    state: np.ndarray | None


class _Registers:
    """Registers of all ranks, and which of them were read since they were last written."""

    def __init__(self, direction: str) -> None:
        self.values: dict[tuple[int, int], _Value] = {}
        self.unread: dict[tuple[int, int], str] = {}
        self._direction, self.step = direction, 0

    def error(self, rank: int, text: str) -> PlanError:
        return PlanError(f"{self._direction}, step {self.step}, rank {rank}: {text}")

    def read(self, rank: int, register: int, parts: int, reader: str) -> _Value:
        value = self.values.get((rank, register), _Value(None, None))
        for part, held, name in ((MAP, value.map, "map"), (STATE, value.state, "state")):
            if parts & part and held is None:
                raise self.error(rank, f"{reader} reads the {name} of register {register}, which has none")
        self.unread.pop((rank, register), None)
        return value

    def write(self, rank: int, register: int, value: _Value, writer: str, adds: bool = False) -> None:
        old = self.values.get((rank, register))
        if old is not None and not adds:
            missing = (value.map is None or old.map is None) and (value.state is None or old.state is None)
            if not missing:
                raise self.error(rank, f"{writer} writes register {register}, which was written before")
            value = _Value(*(x if x is not None else y for x, y in zip(value, old, strict=True)))
        self.values[rank, register] = value
        self.unread[rank, register] = writer

    def run(self, program: StateProgram) -> None:
        """Run all steps, as ranks do: messages are read, then stored, then operations run in their order."""
        messages, operations = program.messages, program.operations
        for self.step in np.union1d(messages["step"], operations["step"]).tolist():
            arrived = []
            for _, src, dst, source, target, parts in messages[messages["step"] == self.step].tolist():
                label = f"a message from rank {src} to rank {dst}"
                value = self.read(src, source, parts, label)
                sent = _Value(value.map if parts & MAP else None, value.state if parts & STATE else None)
                arrived.append((dst, target, sent, label))
            for message in arrived:
                self.write(*message)
            for _, rank, kind, a, b, out in operations[operations["step"] == self.step].tolist():
                self._operate(rank, kind, a, b, out)

    def _operate(self, rank: int, kind: int, a: int, b: int, out: int) -> None:
        label = f"{KIND_NAMES[kind]} into register {out}"
        left = self.read(rank, a, STATE, label)
        assert left.state is not None
        if kind == COMPOSE:
            right = self.read(rank, b, STATE | MAP, label)
            assert right.map is not None
            both = None if left.map is None else left.map @ right.map
            self.write(rank, out, _Value(both, left.state @ right.map + right.state), label)
            return
        added = left.state
        if kind == PULL:
            right = self.read(rank, b, MAP, label)
            assert right.map is not None
            added = left.state @ right.map.T
        old = self.values.get((rank, out), _Value(None, None))
        total = added if old.state is None else old.state + added
        self.write(rank, out, _Value(old.map, total), label, adds=True)

    def check_read(self) -> None:
        """Raise PlanError if something was written that nobody read."""
        for (rank, _), writer in self.unread.items():
            raise PlanError(f"{self._direction}, rank {rank}: nothing reads the result of {writer}")


def _prove(plan: StatePlan) -> None:
    segments, rng = plan.segments, np.random.default_rng(0)
    rank, before = segments["rank"].tolist(), segments["before"].tolist()
    numbers = rng.integers(1, 2**64, (len(segments), 4, 2), dtype=np.uint64)
    maps, states, gradients = numbers[:, :2], numbers[:, 2:3], numbers[:, 3:]
    order = _by_path(before)
    entering, leaving = np.zeros_like(states), np.zeros_like(states)
    for s in order:
        if before[s] >= 0:
            entering[s] = entering[before[s]] @ maps[before[s]] + states[before[s]]
    for s in reversed(order):
        if before[s] >= 0:
            leaving[before[s]] += gradients[s] + leaving[s] @ maps[s].T

    there = _Registers("forward")
    for s in np.flatnonzero(plan.carried).tolist():
        there.values[rank[s], s] = _Value(maps[s] if before[s] >= 0 else None, states[s])
    there.run(plan.forward)
    _check_results(plan, there, plan.forward, entering, "S_in")
    back = _Registers("backward")
    for place, value in there.values.items():
        if value.map is not None:
            back.values[place] = _Value(value.map, None)
    for s in range(len(segments)):
        if before[s] >= 0:
            back.values[rank[s], plan.forward.registers + s] = _Value(None, gradients[s])
    back.run(plan.backward)
    _check_results(plan, back, plan.backward, leaving, "dS_out")


def _by_path(before: list[int]) -> list[int]:
    """Return segments so that `before` of each comes before it; raise PlanError if they go in a circle."""
    below: dict[int, list[int]] = {}
    for s, previous in enumerate(before):
        below.setdefault(previous, []).append(s)
    order = list(below.get(-1, []))
    for s in order:
        order += below.get(s, [])
    if len(order) < len(before):
        raise PlanError("segments: some come before each other")
    return order


def _check_results(plan: StatePlan, held: _Registers, program: StateProgram, wanted: np.ndarray, name: str) -> None:
    meaning = "product of the maps along its path" if name == "S_in" else "sum of the gradients of all that it enters"
    ranks = plan.segments["rank"].tolist()
    for s in np.flatnonzero(program.results >= 0).tolist():
        value = held.read(ranks[s], int(program.results[s]), STATE, f"segment {s}")
        assert value.state is not None
        if not np.array_equal(value.state, wanted[s]):
            record = plan.segments[s]
            raise PlanError(
                f"{name} of segment {s} (rank {record['rank']}, tokens {record['start']} to {record['stop'] - 1}) is "
                f"not the {meaning}"
            )
    held.check_read()
