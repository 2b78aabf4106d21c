"""Which algorithm, with which options, for given batches: candidates' plans are built and simulated.

A candidate is dropped as soon as it cannot be the fastest any more: by what it took so far, what its busiest link or
perfectly balanced attention takes on the batch at hand (:mod:`.bounds`), and the even floor of the batches to come.
That never drops the fastest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mindspeed_cp.cost.bounds import Floor, even_floor, exchange_floor, layout_floor, plan_floor
from mindspeed_cp.cost.candidates import Candidate, candidates
from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.cost.compute import ComputeCost, LayerCost
from mindspeed_cp.cost.memory import layer_bytes, layer_bytes_at_most
from mindspeed_cp.cost.reasons import reasons
from mindspeed_cp.cost.simulate import fitted, simulate
from mindspeed_cp.cost.timeline import Timeline
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.build import algorithm_options, build_plan
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.hierarchical import cluster_of
from mindspeed_cp.plan.program import Plan

#: Tiles are counted on some ranks alone where there are more spans of keys than this: choosing must be quick.
MOST_SPANS = 2**16

#: Algorithms whose ranks take keys from their owners, and those that pass them on: what they take at least, by what
#: ranks see or compute, is known without their plan.
EXCHANGES, RINGS = ("direct", "all_gather"), ("ring", "double_ring")


@dataclass(frozen=True, eq=False)
class Tried:
    """What became of a candidate.

    Attributes:
        candidate: the algorithm and its options.
        seconds: modelled, of one layer, for each batch on which it was simulated: all, or those until it was dropped.
        looked_at: batches on which it was tried, the first ones: all, or those until it was dropped.
        least: seconds that it takes on these, or takes at least: of the last one only a floor may be known.
        cause: what of that one takes so long; empty where it was simulated.
        timeline: of the first batch; None where it was not simulated.
        same_as: a candidate before it that has the same plans.
        refused: why it cannot be taken at all; None for one that can.
    """

    candidate: Candidate
    seconds: tuple[float, ...] = ()
    looked_at: int = 0
    least: float = 0.0
    cause: str = ""
    timeline: Timeline | None = field(default=None, repr=False)
    same_as: Candidate | None = None
    refused: str | None = None


@dataclass(frozen=True, eq=False)
class Decision:
    """The choice for some batches.

    Attributes:
        candidate: the fastest over all batches.
        tried: all candidates: the chosen one, then those that were simulated on all batches, by their time, then the
            others.
        reasons: three lines: what was chosen, where its time goes, what the others would take.
    """

    candidate: Candidate
    tried: tuple[Tried, ...]
    reasons: tuple[str, str, str]


def choose_algorithm(
    batches: Sequence[Documents],
    topology: Topology,
    attention: AttentionConfig,
    cluster: Cluster | None = None,
    layer: LayerCost | None = None,
    memory: float | None = None,
    among: Sequence[Candidate] | None = None,
    options: dict[str, Any] | None = None,
) -> Decision:
    """The algorithm that is modelled fastest for batches like these.

    Args:
        batches: a sample, one or more.
        topology: the ranks; its cluster has the speeds where `cluster` is None.
        attention: of one tensor-parallel rank.
        cluster: what devices and links can do.
        layer: the linear part of a layer; default: :meth:`LayerCost.like` the attention.
        memory: bytes that the attention of a layer may hold on a rank; default: all that a device has.
        among: candidates; default: :func:`.candidates.candidates`.
        options: of the model, such as hidden_size, for the algorithms that have them.

    Returns:
        Deterministic: the same on every rank that asks the same.

    Raises:
        ConfigError: there is no batch, or no candidate can do it; says why for each.
    """
    if not any(batch.tokens for batch in batches):
        raise ConfigError("batches: there is no token in them to choose by; valid: one batch or more, with tokens")
    cluster = cluster_of(topology) if cluster is None else fitted(cluster, topology.ranks_per_node)
    cost = ComputeCost(cluster, attention, layer)
    trial = _Trial(batches, topology, cost, cluster.memory if memory is None else memory, options or {})
    tried = [trial.run(one) for one in (candidates(topology, attention) if among is None else among)]
    full = [one for one in tried if len(one.seconds) == len(batches) and one.refused is None]
    if not tried:
        raise ConfigError("among: there are no candidates to choose from; valid: one or more")
    if not full:
        what = "this batch" if len(batches) == 1 else "all of these batches"
        said = "; ".join(f"{one.candidate}: {one.refused}" for one in tried)
        raise ConfigError(f"algorithm is 'auto': nothing can do {what}: {said}")
    full.sort(key=lambda one: sum(one.seconds))  # stable: of equally fast ones the first candidate
    found = (*full, *(one for one in tried if one not in full))
    return Decision(full[0].candidate, found, reasons(found))


class _Trial:
    """Candidates on some batches, one after the other; arguments as those of `choose_algorithm`."""

    def __init__(
        self,
        batches: Sequence[Documents],
        topology: Topology,
        cost: ComputeCost,
        memory: float,
        options: dict[str, Any],
    ) -> None:
        self._batches, self._topology, self._cost = batches, topology, cost
        self._memory, self._options = memory, options
        self._even = [even_floor(batch, topology.ranks, cost).seconds for batch in batches]
        self._best = float("inf")  # seconds over all batches, of one that fits into memory
        self._known: dict[int, list[tuple[Candidate, Plan, Timeline]]] = {}  # hierarchical plans of each batch

    def run(self, candidate: Candidate) -> Tried:
        """A candidate on all batches, or until it cannot be the fastest."""
        tried, plans, owners = Tried(candidate), [], set()
        try:
            for number, batch in enumerate(self._batches):
                before, after = sum(tried.seconds), sum(self._even[number + 1 :])
                for floor in self._before_planning(candidate, batch):
                    if before + floor.seconds + after > self._best:
                        return _dropped(tried, number, floor)
                plan = self._plan(candidate, batch)
                owner, made = self._found(candidate, number, plan)
                if made is None:
                    floor = plan_floor(plan, self._cost)
                    if before + floor.seconds + after > self._best:
                        return _dropped(tried, number, floor)
                    made = simulate(plan, self._cost.cluster, self._cost.layer, MOST_SPANS)
                    if candidate.algorithm == "hierarchical":
                        self._known.setdefault(number, []).append((candidate, plan, made))
                owners.add(owner)
                plans.append(plan)
                tried = replace(
                    tried,
                    seconds=(*tried.seconds, made.total),
                    looked_at=number + 1,
                    least=before + made.total,
                    timeline=made if tried.timeline is None else tried.timeline,
                )
                if tried.least + after > self._best and after:
                    return tried
        except ConfigError as error:
            return replace(tried, refused=str(error))
        total = sum(tried.seconds)
        if total < self._best:  # what holds too much must not drop others
            held = bytes_over(plans, self._cost.layer, self._memory)
            if held is not None:
                said = f"holds {held / 2**30:.3g} GiB in one layer; there are {self._memory / 2**30:.3g}"
                return replace(tried, refused=said)
            self._best = total
        return replace(tried, same_as=owners.pop() if len(owners) == 1 and candidate not in owners else None)

    def _before_planning(self, candidate: Candidate, batch: Documents) -> Iterator[Floor]:
        """What is known of a candidate without its plan: of those that are cut over ranks by a layout."""
        given, ranks = self._given(candidate), self._topology.ranks
        layout = given.get("layout", "zigzag")
        if candidate.algorithm in EXCHANGES:
            yield exchange_floor(batch, self._topology, self._cost, layout)
        elif candidate.algorithm in RINGS:
            yield layout_floor(batch, ranks, self._cost, layout)

    def _found(self, candidate: Candidate, number: int, plan: Plan) -> tuple[Candidate, Timeline | None]:
        """Who had the plan first, and its timeline; the candidate itself, and None, where nobody had."""
        for owner, known, timeline in self._known.get(number, ()):
            if same_plan(known, plan):
                return owner, timeline
        return candidate, None

    def _given(self, candidate: Candidate) -> dict[str, Any]:
        known = algorithm_options(candidate.algorithm)
        return {name: value for name, value in self._options.items() if name in known} | dict(candidate.options)

    def _plan(self, candidate: Candidate, batch: Documents) -> Plan:
        """A candidate's plan of a batch."""
        return build_plan(batch, self._topology, self._cost.attention, candidate.algorithm, **self._given(candidate))


def bytes_over(plans: Sequence[Plan], layer: LayerCost, memory: float) -> int | None:
    """Bytes that one of the plans holds in a layer on a rank, the most, if that is more than there is."""
    element = layer.bytes_per_element
    large = [plan for plan in plans if layer_bytes_at_most(plan, element).max() > memory]
    held = max((int(layer_bytes(plan, element).max()) for plan in large), default=0)
    return held if held > memory else None


def _dropped(tried: Tried, number: int, floor: Floor) -> Tried:
    """At a batch of which only the floor is known."""
    return replace(tried, looked_at=number + 1, least=sum(tried.seconds) + floor.seconds, cause=floor.cause)


def same_plan(one: Plan, other: Plan) -> bool:
    """Whether two plans of the same batch, ranks and attention do the same."""
    if (one.order, one.order_backward, len(one.parts)) != (other.order, other.order_backward, len(other.parts)):
        return False
    pairs = [(one, other), *zip(one.parts, other.parts, strict=True)]
    return all(_same_arrays(_arrays(a), _arrays(b)) for a, b in pairs)


def _same_arrays(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))


def _arrays(plan: Plan) -> list[np.ndarray]:
    """All that a plan without its parts is made of."""
    linear = plan.layout if plan.linear is None else plan.linear
    layouts = (plan.layout, plan.layout_kv, plan.q_layout, plan.kv_layout, linear)
    found = [array for layout in layouts for array in (layout.spans, layout.heads) if array is not None]
    for program in (plan.forward, plan.backward):
        found += [program.capacity, program.contents, program.spans]
        for messages in (program.fetch, program.reduce):
            found += [messages.items, messages.runs]
    return found
