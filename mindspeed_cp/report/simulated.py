"""Algorithms compared by simulation on the same batches: figures of each, timelines for the pictures, refusals.

All times are modelled (:mod:`mindspeed_cp.cost.simulate`), of one layer, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_cp.cost import Cluster, LayerCost
from mindspeed_cp.cost.simulate import simulate
from mindspeed_cp.cost.timeline import Timeline
from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology, build_plan
from mindspeed_cp.plan.estimate import Estimate
from mindspeed_cp.report.waits import causes


@dataclass(frozen=True)
class Problem:
    """What is simulated, whatever the algorithm.

    Attributes:
        batches: packed batches, at least one.
        topology: the context-parallel ranks.
        attention: of one layer, on one tensor-parallel rank.
        cluster: devices and links, of `topology.ranks_per_node` ranks a node.
        layer: the linear part of the layer.
        source: where the lengths are from, for people.
        notes: what a reader must know of how this stands for a training.
        sharing: of links, as for :func:`mindspeed_cp.cost.simulate.simulate`.
        sizes: of the model of a training, options of the algorithms that cost linear layers.
    """

    batches: tuple[Documents, ...]
    topology: Topology
    attention: AttentionConfig
    cluster: Cluster
    layer: LayerCost
    source: str = ""
    notes: tuple[str, ...] = ()
    sharing: str = "fair"
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bound(self) -> float:
        """Modelled seconds that no plan can beat: perfect balance, whole tiles, nothing exposed; mean of batches."""
        where = self.topology, self.attention, self.cluster, self.layer
        # Routing is of no importance to the bound.
        return float(np.mean([Estimate(batch, batch, *where, routing=True).bound for batch in self.batches]))


@dataclass(frozen=True)
class Wanted:
    """An algorithm to simulate.

    Attributes:
        algorithm: its name.
        options: that were asked for; part of the name.
        model: options that tell it the sizes of the model; not part of the name.
    """

    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """ "direct", or "direct, layout=balanced"."""
        said = (str(value).lower() if isinstance(value, bool) else str(value) for value in self.options.values())
        return ", ".join([self.algorithm, *(f"{key}={text}" for key, text in zip(self.options, said, strict=True))])


#: What all others are compared with: every document cut evenly over all ranks.
EVEN_RING = Wanted("ring")


@dataclass(frozen=True)
class Figures:
    """One algorithm; seconds are modelled, of one layer, means of all ranks and batches.

    Attributes:
        seconds: until the last rank is done.
        speedup: of the even ring's time over this, all batches together.
        fraction: of the bound over this: 1 is perfect balance with nothing exposed.
        imbalance: busy time of the busiest rank over the mean, less one.
        attention, linear: kernels.
        exposed: waits for messages that are due.
        late: waits for the slowest rank at the end.
        hidden: computing while messages arrive.
        sent, sent_most: bytes that a rank sends: mean, and of the one that sends most.
        memory: bytes that attention holds at its fullest moment, most of all ranks and batches.
        causes: of exposed and late: (what is waited for, seconds), the largest first.
    """

    seconds: float
    speedup: float
    fraction: float
    imbalance: float
    attention: float
    linear: float
    exposed: float
    late: float
    hidden: float
    sent: float
    sent_most: float
    memory: float
    causes: tuple[tuple[str, float], ...]

    @property
    def compute(self) -> float:
        """Kernels of attention and linear layers."""
        return self.attention + self.linear


@dataclass(frozen=True, eq=False)
class Simulated:
    """An algorithm that was simulated: its figures, and its timeline on the first batch."""

    wanted: Wanted
    figures: Figures
    timeline: Timeline

    @property
    def name(self) -> str:
        """Of the algorithm, with its options."""
        return self.wanted.name


@dataclass(frozen=True)
class Refused:
    """An algorithm that cannot run the problem, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` finds.

    Attributes:
        problem: that was given.
        bound: modelled seconds that no plan can beat.
        ring: the even ring, with which all are compared.
        simulated: algorithms, that ring among them, the fastest first.
        refused: those that cannot run it.
        notes: those of the problem, and what was found while simulating.
    """

    problem: Problem
    bound: float
    ring: Simulated
    simulated: tuple[Simulated, ...]
    refused: tuple[Refused, ...]
    notes: tuple[str, ...]

    def ms(self, seconds: float) -> str:
        """Seconds as milliseconds, in as many digits as times of this problem need: "136.53", "0.0912"."""
        return f"{seconds * 1e3:,.{2 if self.bound >= 1e-3 else 4}f}"

    def named(self, name: str) -> Simulated | None:
        """The algorithm of this name, if it was simulated."""
        return next((one for one in self.simulated if one.name == name), None)


def compare(problem: Problem, wanted: Sequence[Wanted]) -> Comparison:
    """Simulate algorithms on the batches of a problem.

    Args:
        problem: what is to be computed, and where.
        wanted: algorithms; those that are given twice are simulated once. The even ring is always simulated.

    Raises:
        ConfigError: the even ring cannot run the problem; or the batches have no tokens.
    """
    if not sum(batch.tokens for batch in problem.batches):
        raise ConfigError("the batch has no tokens; give documents with at least one, such as --lengths 700,30,4100")
    bound = problem.bound
    even = _timelines(problem, EVEN_RING)
    ring_seconds = even.seconds
    ring = Simulated(EVEN_RING, even.figures(ring_seconds, bound), even.first)
    simulated = [ring]
    refused: list[Refused] = []
    named: dict[str, Wanted] = {}
    for one in wanted:
        named.setdefault(one.name, one)
    for one in named.values():
        if one.name == EVEN_RING.name:
            continue
        try:
            found = _timelines(problem, one)
        except (ConfigError, PlanError) as error:
            refused.append(Refused(one.name, str(error)))
            continue
        simulated.append(Simulated(one, found.figures(ring_seconds, bound), found.first))
    simulated.sort(key=lambda one: one.figures.seconds)
    return Comparison(problem, bound, ring, tuple(simulated), tuple(refused), _notes(problem, simulated))


class _Sums:
    """What is kept of the timelines of one algorithm on all batches."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []
        self.causes: dict[str, float] = {}
        self.timelines: list[Timeline] = []

    def add(self, timeline: Timeline) -> None:
        """One more batch; only the first one's timeline is kept."""
        waiting, exposed, sent = timeline.waiting, timeline.exposed, timeline.bytes_sent
        self.rows.append(
            (
                timeline.total,
                timeline.imbalance,
                float(timeline.compute.mean()),
                float(timeline.linear.mean()),
                float(exposed.mean()),
                float((waiting - exposed).mean()),
                float(timeline.hidden.mean()),
                float(sent.mean()),
                float(sent.max()),
                float(timeline.memory.max()),
            )
        )
        for name, seconds in causes(timeline):
            self.causes[name] = self.causes.get(name, 0.0) + seconds
        self.timelines = self.timelines or [timeline]

    @property
    def first(self) -> Timeline:
        """Of the first batch."""
        return self.timelines[0]

    @property
    def seconds(self) -> float:
        """Mean of the batches."""
        return float(np.mean([row[0] for row in self.rows]))

    def figures(self, ring: float, bound: float) -> Figures:
        """Of all batches; `ring` and `bound` are seconds."""
        table = np.array(self.rows)
        seconds, imbalance, attention, linear, exposed, late, hidden, sent = table[:, :8].mean(0).tolist()
        why = sorted(((name, total / len(table)) for name, total in self.causes.items()), key=lambda one: -one[1])
        return Figures(
            seconds,
            ring / seconds,
            bound / seconds,
            imbalance,
            attention,
            linear,
            exposed,
            max(late, 0.0),
            hidden,
            sent,
            float(table[:, 8].max()),
            float(table[:, 9].max()),
            tuple(why),
        )


def _timelines(problem: Problem, wanted: Wanted) -> _Sums:
    out = _Sums()
    for batch in problem.batches:
        plan = build_plan(
            batch, problem.topology, problem.attention, wanted.algorithm, **{**wanted.model, **wanted.options}
        )
        out.add(simulate(plan, problem.cluster, problem.layer, sharing=problem.sharing))
    return out


def _notes(problem: Problem, simulated: Sequence[Simulated]) -> tuple[str, ...]:
    found = list(problem.notes)
    if problem.sharing == "fifo":
        found.append("links are shared fifo: a message holds its place at a busy receiver; the default is fair")
    ranks = problem.topology.ranks
    for one in simulated:
        if one.figures.memory > problem.cluster.memory:
            found.append(
                f"{one.name} holds {one.figures.memory / 2**30:,.1f} GiB for attention alone on its fullest rank; a "
                f"device of {problem.cluster.name} has {problem.cluster.memory / 2**30:,.1f} GiB"
            )
    some = [f"{one.timeline.looked_at} ({one.name})" for one in simulated if one.timeline.looked_at < ranks]
    if some:
        found.append(
            f"tiles of some of the {ranks} ranks were counted, and stand for their neighbours': {', '.join(some)}"
        )
    return tuple(found)
