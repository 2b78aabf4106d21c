"""Comparison of algorithms by simulation on the same batches: metrics, timelines for the pictures, refusals.

All times are modelled (:mod:`mindspeed_cp.simulate.simulator`), of one layer, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost
from mindspeed_cp.cluster.compute import balanced_lower_bound
from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Plan, Topology
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.timeline import Timeline, waiting_causes


@dataclass(frozen=True)
class SimulationCase:
    """Input of a simulation that does not depend on the algorithm.

    Attributes:
        batches: packed batches, at least one.
        topology: the context-parallel ranks.
        attention: attention of one tensor-parallel rank.
        cluster: devices and links, with `topology.ranks_per_node` ranks in use on each node.
        layer: linear part of the layer.
        source: description of the source of the lengths.
        notes: remarks on how the case represents a training.
        sizes: sizes of the model, for the options of algorithms that take them.
    """

    batches: tuple[Documents, ...]
    topology: Topology
    attention: AttentionConfig
    cluster: Cluster
    layer: LayerCost
    source: str = ""
    notes: tuple[str, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)


#: Reference of all comparisons: every document is cut evenly over all ranks.
EVEN_RING = Candidate("ring")


@dataclass(frozen=True)
class LayerMetrics:
    """Metrics of one algorithm; seconds are modelled for one layer and are means over ranks and batches.

    Attributes:
        seconds: until the last rank is done.
        speedup: seconds of the even ring divided by these.
        fraction: lower bound divided by these; 1: perfect balance, whole tiles, no exposed communication.
        imbalance: busy seconds of the busiest rank over the mean; 1 is even.
        attention, linear: kernel seconds.
        exposed: waits for messages that are due.
        late: waits for the slowest rank at the end.
        hidden: computation while messages arrive.
        sent, sent_most: bytes that a rank sends: the mean, and the maximum.
        memory: peak bytes of the attention, maximum over ranks and batches.
        waiting_causes: causes of exposed and late: (what is waited for, seconds), the largest first.
        batch_seconds: `seconds` of each batch.
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
    waiting_causes: tuple[tuple[str, float], ...]
    batch_seconds: tuple[float, ...] = ()

    @property
    def compute(self) -> float:
        """Kernel seconds of attention and linear layers."""
        return self.attention + self.linear


@dataclass(frozen=True, eq=False)
class AlgorithmResult:
    """A simulated algorithm: its metrics, and its timeline on the first batch."""

    candidate: Candidate
    metrics: LayerMetrics
    timeline: Timeline

    @property
    def name(self) -> str:
        """The algorithm with its options, as settings and command line write it."""
        return self.candidate.as_setting


@dataclass(frozen=True, eq=False)
class Comparison:
    """Result of :func:`compare_algorithms`.

    Attributes:
        case: the simulated case.
        bound: modelled seconds that no plan can beat, mean over batches.
        ring: the even ring, with which all others are compared.
        results: simulated algorithms, with the even ring, the fastest first.
        refused: algorithms that cannot run the case, by name, with the reason.
        notes: notes of the case, and notes of the simulation.
        range_ends: (seconds of the fastest, of the even ring) on the first batch where values of the cluster that have
            a range are at its fast end, and where they are at its slow end; empty: none has a range.
    """

    case: SimulationCase
    bound: float
    ring: AlgorithmResult
    results: tuple[AlgorithmResult, ...]
    refused: dict[str, str]
    notes: tuple[str, ...]
    range_ends: tuple[tuple[float, float], ...] = ()

    def ms(self, seconds: float) -> str:
        """Return seconds as milliseconds, with as many digits as times of this case need: "136.53", "0.0912"."""
        return f"{seconds * 1e3:,.{2 if self.bound >= 1e-3 else 4}f}"

    def __repr__(self) -> str:
        times = ", ".join(f"{result.name} {self.ms(result.metrics.seconds)} ms" for result in self.results)
        return f"Comparison({times}; modelled)"


def compare_algorithms(
    case: SimulationCase, candidates: Sequence[Candidate], on_start: Callable[[str], None] = lambda name: None
) -> Comparison:
    """Simulate algorithms on the batches of a case.

    Args:
        case: what is computed, and where.
        candidates: algorithms; those that are given twice are simulated once. The even ring is always simulated.
        on_start: called with the name of each algorithm before it is simulated.

    Raises:
        ConfigError: The even ring cannot run the case, or the batches have no tokens.
    """
    if not sum(batch.tokens for batch in case.batches):
        raise ConfigError("the batch has no tokens; give documents with at least one, such as --lengths 700,30,4100")
    cost = ComputeCost(case.cluster, case.attention, case.layer)
    bound = float(np.mean([balanced_lower_bound(batch, case.topology.ranks, cost) for batch in case.batches]))
    on_start(EVEN_RING.as_setting)
    ring = _simulate(case, EVEN_RING, bound)
    results, refused = [ring], {}
    for candidate in dict.fromkeys(candidates):
        if candidate == EVEN_RING:
            continue
        on_start(candidate.as_setting)
        try:
            results.append(_simulate(case, candidate, bound, ring.metrics.seconds))
        except (ConfigError, PlanError) as error:
            refused[candidate.as_setting] = str(error)
    results.sort(key=lambda result: result.metrics.seconds)
    ends = []
    for slow in (False, True) if case.cluster.ranges else ():
        end, plans = case.cluster.at_range_end(slow), (results[0].timeline.plan, ring.timeline.plan)
        fastest, even = (simulate_plan(plan, end, case.layer).total for plan in plans)
        ends.append((fastest, even))
    return Comparison(case, bound, ring, tuple(results), refused, _notes(case, results), tuple(ends))


def _simulate(
    case: SimulationCase, candidate: Candidate, bound: float, ring_seconds: float | None = None
) -> AlgorithmResult:
    """Simulate an algorithm on all batches; without `ring_seconds` it is the even ring itself."""
    timelines: list[Timeline] = []
    means, largest = [], []
    seconds_by_cause: dict[str, float] = {}
    for batch in case.batches:
        plan = candidate.build_plan(batch, case.topology, case.attention, case.sizes)
        timeline = simulate_plan(plan, case.cluster, case.layer)
        timelines = timelines or [timeline]
        waiting, exposed, sent = timeline.waiting, timeline.exposed, timeline.bytes_sent
        per_rank = (timeline.compute, timeline.linear, exposed, waiting - exposed, timeline.hidden, sent)
        means.append((timeline.total, timeline.imbalance, *(float(values.mean()) for values in per_rank)))
        largest.append((float(sent.max()), float(timeline.memory.max())))
        for cause, waiting_seconds in waiting_causes(timeline):
            seconds_by_cause[cause] = seconds_by_cause.get(cause, 0.0) + waiting_seconds
    seconds, imbalance, attention, linear, exposed, late, hidden, sent = np.mean(means, axis=0).tolist()
    sent_most, memory = np.max(largest, axis=0).tolist()
    causes = [(cause, total / len(means)) for cause, total in seconds_by_cause.items()]
    metrics = LayerMetrics(
        seconds=seconds,
        speedup=(seconds if ring_seconds is None else ring_seconds) / seconds,
        fraction=bound / seconds,
        imbalance=imbalance,
        attention=attention,
        linear=linear,
        exposed=exposed,
        late=max(late, 0.0),
        hidden=hidden,
        sent=sent,
        sent_most=sent_most,
        memory=memory,
        waiting_causes=tuple(sorted(causes, key=lambda cause: -cause[1])),
        batch_seconds=tuple(batch[0] for batch in means),
    )
    return AlgorithmResult(candidate, metrics, timelines[0])


def idle_ranks_note(plan: Plan) -> list[str]:
    """Return a note if ranks of a plan compute no heads, else nothing."""
    idle = int((plan.q_layout_compute.head_counts(plan.attention.heads) == 0).sum())
    text = (
        f"{plan.algorithm}: {plan.attention.heads} heads are fewer than {plan.ranks} ranks: {idle} of these "
        f"compute{'s' * (idle == 1)} nothing; hybrid with --set ulysses_degree=... of at most the number of heads "
        "keeps all of them busy"
    )
    return [text] if idle else []


def _notes(case: SimulationCase, results: Sequence[AlgorithmResult]) -> tuple[str, ...]:
    notes, ranks, cluster = list(case.notes), case.topology.ranks, case.cluster
    for result in results:
        notes += idle_ranks_note(result.timeline.plan)
        if result.metrics.memory > cluster.memory:
            notes.append(
                f"{result.name} holds {result.metrics.memory / 2**30:,.1f} GiB for attention alone on its fullest "
                f"rank; a device of {cluster.name} has {cluster.memory / 2**30:,.1f} GiB"
            )
    counted = [
        f"{result.timeline.ranks_counted} ({result.name})"
        for result in results
        if result.timeline.ranks_counted < ranks
    ]
    if counted:
        notes.append(
            f"tiles of some of the {ranks} ranks were counted, and stand for their neighbours': {', '.join(counted)}"
        )
    return tuple(notes)
