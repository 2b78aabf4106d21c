"""build_state_plan: who sends which state or map when, by four schedules, of which the cost model takes the fastest.

::

    relay     a state goes from segment to segment; each makes S M + H of it     fewest bytes; a round for each border
    gather    a rank gets the maps of all that comes before, and multiplies      1 round
    scan      pointer jumping: in round k the map of 2^k segments                1 + log2 rounds
    heads     all-to-all: each rank has all documents of a range of heads        bytes grow with tokens, not borders

In the backward only gradients travel, of the size of a state: along the same ways back, and under `gather` with the
maps of what comes after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import TOKEN_SPAN, Layout
from mindspeed_cp.plan.problem import Topology
from mindspeed_cp.plan.states import (
    ADD,
    COMPOSE,
    MAP,
    PULL,
    STATE,
    STATE_MESSAGE,
    STATE_OPERATION,
    StateConfig,
    StatePlan,
    StateProgram,
    depths_of,
    segments_of,
)
from mindspeed_cp.schema.messages import short_repr
from mindspeed_cp.schema.numbers import check_type
from mindspeed_cp.simulate.states import simulate_states

#: `auto` leaves out a schedule with more messages than about this: planning would take longer than the layer, and so
#: many borders are cheaper by heads.
MESSAGE_LIMIT = 20_000


class _ProgramBuilder:
    """Collects messages and operations, and numbers registers."""

    def __init__(self, registers: int) -> None:
        self.registers = registers
        self._messages: list[tuple[int, ...]] = []
        self._operations: list[tuple[int, ...]] = []

    def new(self) -> int:
        """Return the number of a register that nothing uses yet."""
        self.registers += 1
        return self.registers - 1

    def send(self, step: int, src: int, dst: int, source: int, parts: int = STATE, target: int | None = None) -> int:
        """Send a register to another rank; return the register there, by default a new one."""
        target = self.new() if target is None else target
        self._messages.append((step, src, dst, source, target, parts))
        return target

    def compute(self, step: int, rank: int, kind: int, a: int, out: int, b: int = -1) -> int:
        """Add an operation; return `out`."""
        self._operations.append((step, rank, kind, a, b, out))
        return out

    def program(self, results: Sequence[int] | np.ndarray) -> StateProgram:
        """Return the program. Operations of a step keep the order in which they were added."""
        messages = np.array(self._messages, STATE_MESSAGE)
        operations = np.array(self._operations, STATE_OPERATION)
        pairing = messages["src"] ^ messages["dst"]  # as in Messages.in_global_order
        return StateProgram(
            self.registers,
            messages[np.lexsort((messages["target"], messages["src"], pairing, messages["step"]))],
            operations[np.argsort(operations["step"], kind="stable")],
            np.array(results, np.int64),
        )


class _Chains:
    """Segments as lists, with what schedules ask of them.

    Attributes:
        rank, before: of each segment.
        after: segments that each one enters.
        by_depth: segments that others enter or that enter others, those before first.
    """

    def __init__(self, segments: np.ndarray) -> None:
        self.rank, self.before = segments["rank"].tolist(), segments["before"].tolist()
        self.after: list[list[int]] = [[] for _ in self.rank]
        depth = depths_of(segments, np.ones(len(segments), np.int64))
        order = np.argsort(depth, kind="stable").tolist()
        for s in order:
            if self.before[s] >= 0:
                self.after[self.before[s]].append(s)
        self.by_depth = [s for s in order if self.before[s] >= 0 or self.after[s]]
        entered = segments["before"] >= 0
        crosses = np.zeros(len(segments), np.int64)
        crosses[entered] = segments["rank"][segments["before"][entered]] != segments["rank"][entered]
        self.borders = depths_of(segments, crosses).tolist()  # crossed on the way to each segment

    def __len__(self) -> int:
        return len(self.rank)


def _relay(chains: _Chains) -> tuple[StateProgram, StateProgram]:
    rank, before = chains.rank, chains.before
    there, results = _ProgramBuilder(len(chains)), [-1] * len(chains)
    sent: dict[tuple[int, int], int] = {}  # S_out of a segment at a rank, where it has several continuations
    leaving: dict[int, int] = {}
    for s in chains.by_depth:
        previous = before[s]
        if previous >= 0:
            results[s] = leaving[previous]
            if rank[previous] != rank[s]:
                key = previous, rank[s]
                if key not in sent:
                    sent[key] = there.send(chains.borders[s], rank[previous], rank[s], leaving[previous])
                results[s] = sent[key]
        if chains.after[s]:
            leaving[s] = s
            if previous >= 0:
                leaving[s] = there.compute(chains.borders[s], rank[s], COMPOSE, results[s], there.new(), s)
    forward = there.program(results)

    back, results = _ProgramBuilder(forward.registers + len(chains)), [-1] * len(chains)
    gradient: dict[int, int] = {}  # register of dS_in
    step = [0] * len(chains)  # of dS_in
    for s in reversed(chains.by_depth):
        arrived = []
        by_rank = defaultdict(list)
        for following in chains.after[s]:
            by_rank[rank[following]].append(following)
        for other, group in by_rank.items():  # what is on one rank is summed there
            ready = max(step[c] for c in group)
            register = _sum(back, ready, other, [gradient[c] for c in group])
            if other != rank[s]:
                ready += 1
                register = back.send(ready, other, rank[s], register)
            arrived.append(register)
            step[s] = max(step[s], ready)
        results[s] = _sum(back, step[s], rank[s], arrived) if arrived else -1
        if before[s] >= 0:
            gradient[s] = forward.registers + s
            if arrived:
                gradient[s] = back.compute(step[s], rank[s], ADD, forward.registers + s, back.new())
                back.compute(step[s], rank[s], PULL, results[s], gradient[s], s)
    return forward, back.program(results)


def _sum(program: _ProgramBuilder, step: int, rank: int, registers: Sequence[int]) -> int:
    """Return the register with the sum of states; a single one is its own."""
    if len(registers) == 1:
        return registers[0]
    total = program.new()
    for register in registers:
        program.compute(step, rank, ADD, register, total)
    return total


def _gather(chains: _Chains) -> tuple[StateProgram, StateProgram]:
    rank, before = chains.rank, chains.before
    there, results = _ProgramBuilder(len(chains)), [-1] * len(chains)
    maps: set[tuple[int, int]] = set()  # (segment, rank) whose map is there
    for s in chains.by_depth:
        if before[s] < 0:
            continue
        run, above = [], before[s]
        while above >= 0 and not (rank[above] == rank[s] and before[above] >= 0):
            run.append(above)
            above = before[above]
        current = results[above] if above >= 0 else -1  # S_in of the nearest segment before on this rank
        if above >= 0:
            run.append(above)
        for passed in reversed(run):
            if rank[passed] != rank[s] and (passed, rank[s]) not in maps:
                maps.add((passed, rank[s]))
                parts = STATE | MAP if before[passed] >= 0 else STATE
                there.send(0, rank[passed], rank[s], passed, parts, passed)
            current = passed if current < 0 else there.compute(0, rank[s], COMPOSE, current, there.new(), passed)
        results[s] = current
    forward = there.program(results)

    back, results = _ProgramBuilder(forward.registers + len(chains)), [-1] * len(chains)
    gradients: dict[tuple[int, int], int] = {}  # R of a segment at a rank

    def local(s: int, place: int) -> int:
        """Return R of a segment at a rank."""
        if rank[s] == place:
            return forward.registers + s
        if (s, place) not in gradients:
            gradients[s, place] = back.send(0, rank[s], place, forward.registers + s)
        return gradients[s, place]

    for s in reversed(chains.by_depth):
        if not chains.after[s]:
            continue
        below, open_segments = [], list(chains.after[s])
        while open_segments:  # down to segments of this rank, whose dS_out is known
            below.append(open_segments.pop())
            if rank[below[-1]] != rank[s]:
                open_segments += chains.after[below[-1]]
        entering: dict[int, int] = {}
        for c in reversed(below):
            leaving = results[c] if rank[c] == rank[s] else -1
            if rank[c] != rank[s] and chains.after[c]:
                leaving = _sum(back, 0, rank[s], [entering[x] for x in chains.after[c]])
            entering[c] = local(c, rank[s])
            if leaving >= 0:
                if rank[c] != rank[s] and (c, rank[s]) not in maps:
                    maps.add((c, rank[s]))
                    back.send(0, rank[c], rank[s], c, MAP, c)
                entering[c] = back.compute(0, rank[s], ADD, entering[c], back.new())
                back.compute(0, rank[s], PULL, leaving, entering[c], c)
        results[s] = _sum(back, 0, rank[s], [entering[c] for c in chains.after[s]])
    return forward, back.program(results)


def _scan(chains: _Chains) -> tuple[StateProgram, StateProgram]:
    rank, before = chains.rank, chains.before
    entered = [s for s in chains.by_depth if before[s] >= 0]
    there = _ProgramBuilder(len(chains))
    sent: dict[tuple[int, int], int] = {}

    def fetch(step: int, s: int, register: int, target: int, parts: int) -> int:
        """Return the register at the rank of segment `target` that holds one of the rank of segment s."""
        if rank[s] == rank[target]:
            return register
        key = register, rank[target]
        if key not in sent:
            sent[key] = there.send(step, rank[s], rank[target], register, parts)
        return sent[key]

    # passed[s]: map of the segments from pointer[s] up to that before s; without M once pointer[s] is a root, or -1
    pointer = {s: before[s] for s in entered}
    passed = {s: fetch(0, before[s], before[s], s, STATE | MAP if before[before[s]] >= 0 else STATE) for s in entered}
    jumps: list[list[tuple[int, int, int]]] = []
    while True:
        level = [(s, pointer[s], passed[s]) for s in entered if pointer[s] >= 0 and before[pointer[s]] >= 0]
        if not level:
            break
        jumps.append(level)
        new, step = {}, len(jumps)
        for s, far, register in level:
            is_whole = pointer[far] < 0 or before[pointer[far]] < 0
            arrived = fetch(step, far, passed[far], s, STATE if is_whole else STATE | MAP)
            new[s] = there.compute(step, rank[s], COMPOSE, arrived, there.new(), register)
        pointer = {s: pointer[pointer[s]] if s in new else -1 for s in entered}
        passed |= new
    results = [passed.get(s, -1) for s in range(len(chains))]
    forward = there.program(results)

    back = _ProgramBuilder(forward.registers + len(chains))
    total = {s: forward.registers + s for s in entered}  # R of s, and of what comes after it as far as it was pulled
    receives = {far for level in jumps for _, far, _ in level}
    for s in entered:
        if s in receives:
            total[s] = back.compute(0, rank[s], ADD, total[s], back.new())
    for step, level in enumerate(jumps):
        groups: dict[tuple[int, int], int] = {}  # sum of what a rank sends to a segment
        for s, far, register in level:
            if (far, rank[s]) not in groups:
                groups[far, rank[s]] = back.new()
            back.compute(step, rank[s], PULL, total[s], groups[far, rank[s]], register)
        for (far, place), pulled in groups.items():
            if place != rank[far]:
                pulled = back.send(step + 1, place, rank[far], pulled)
            back.compute(step + 1, rank[far], ADD, pulled, total[far])
    results = [-1] * len(chains)
    for s in chains.by_depth:
        by_rank: dict[int, list[int]] = defaultdict(list)
        for following in chains.after[s]:
            by_rank[rank[following]].append(total[following])
        leaving = []
        for place, registers in by_rank.items():
            summed = _sum(back, len(jumps), place, registers)
            leaving.append(summed if place == rank[s] else back.send(len(jumps) + 1, place, rank[s], summed))
        if leaving:
            results[s] = _sum(back, len(jumps) + 1, rank[s], leaving)
    return forward, back.program(results)


#: Schedules of states between ranks; "heads" is the relay of each rank's own segments.
SCHEDULES: dict[str, Callable[[_Chains], tuple[StateProgram, StateProgram]]] = {
    "relay": _relay,
    "gather": _gather,
    "scan": _scan,
    "heads": _relay,
}


def build_state_plan(
    layout: Layout, state: StateConfig, topology: Topology | None = None, schedule: str = "auto"
) -> StatePlan:
    """Build the plan of a layer's states for a layout. Pure: the same arguments give the same plan, on every rank.

    Args:
        layout: rows of each rank, with all heads: of the layer before, as `Plan.batch_layout`.
        state: linear attention of the layer.
        topology: ranks and nodes, and the cluster for decisions by cost; default: one node.
        schedule: "relay", "gather", "scan", "heads", or "auto", which takes the fastest by the cost model.

    Raises:
        ConfigError: an argument is not valid, or the layout has other ranks than the topology.
        PlanError: a token is on no rank or on several.
    """
    check_type("layout", layout, Layout, "as Plan.batch_layout")
    check_type("state", state, StateConfig, "StateConfig(...)")
    topology = Topology(1, layout.ranks) if topology is None else topology
    check_type("topology", topology, Topology, "Topology(...)")
    if topology.ranks != layout.ranks:
        raise ConfigError(f"the layout is for {layout.ranks} ranks, the topology has {topology.ranks}")
    if layout.heads is not None:
        raise ConfigError("layout splits heads; valid: all heads on every rank, as Plan.batch_layout")
    if not isinstance(schedule, str) or schedule not in ("auto", *SCHEDULES):
        raise ConfigError(f"schedule is {short_repr(schedule)}; valid: auto, {', '.join(SCHEDULES)}")
    layout.check()
    if schedule != "auto":
        return _build(layout, state, topology, schedule)
    segments, cluster = segments_of(layout), cluster_of(topology)
    relay = _build(layout, state, topology, "relay", segments)
    if not relay.borders:
        return relay
    seconds = {plan: simulate_states(plan, cluster).total for plan in (relay, _build(layout, state, topology, "heads"))}
    if simulate_states(_at_once(relay), cluster).total < min(seconds.values()):
        passed = depths_of(segments, (segments["before"] >= 0).astype(np.int64))  # segments before each
        rounds = int(passed.max(initial=1)).bit_length()
        for name, messages in (("scan", relay.borders * rounds), ("gather", int(passed.sum()))):
            if messages <= MESSAGE_LIMIT:
                plan = _build(layout, state, topology, name, segments)
                seconds[plan] = simulate_states(plan, cluster).total
    return min(seconds, key=lambda plan: seconds[plan])


def _at_once(relay: StatePlan) -> StatePlan:
    """Return a relay whose messages wait for nothing, and carry a map where something enters what they leave: a lower
    bound of what `scan` and `gather` receive and take."""
    programs = {}
    for direction in ("forward", "backward"):
        program: StateProgram = getattr(relay, direction)
        messages = program.messages.copy()
        messages["step"] = 0
        if direction == "forward":
            messages["parts"][messages["source"] >= len(relay.segments)] |= MAP
        programs[direction] = replace(program, messages=messages, operations=program.operations[:0])
    return replace(relay, forward=programs["forward"], backward=programs["backward"])


def _build(
    layout: Layout, state: StateConfig, topology: Topology, schedule: str, segments: np.ndarray | None = None
) -> StatePlan:
    compute_layout = heads_layout(layout, state.heads) if schedule == "heads" else layout
    segments = segments_of(compute_layout) if segments is None else segments
    programs = SCHEDULES[schedule](_Chains(segments))
    return StatePlan(schedule, state, topology, layout, compute_layout, segments, *programs)


def heads_layout(layout: Layout, heads: int) -> Layout:
    """Return the layout in which every rank has all tokens of a range of heads; ranges differ by at most one head."""
    documents = layout.documents
    docs = np.flatnonzero(documents.lengths > 0)
    bounds = np.arange(layout.ranks + 1) * heads // layout.ranks
    spans = np.empty((layout.ranks, len(docs)), TOKEN_SPAN)
    spans["rank"], spans["doc"] = np.arange(layout.ranks)[:, None], docs
    spans["start"], spans["stop"] = documents.offsets[docs], documents.offsets[docs + 1]
    return Layout(documents, layout.ranks, spans.reshape(-1), np.stack([bounds[:-1], bounds[1:]], 1))
