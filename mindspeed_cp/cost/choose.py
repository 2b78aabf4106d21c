"""Which algorithm, with which options, for given batches: candidates' plans are built and simulated.

A candidate is dropped as soon as it cannot be the fastest any more: by what it took so far, what its busiest link or
perfectly balanced attention takes on the batch at hand (:mod:`.bounds`), and the even floor of the batches to come.
That never drops the fastest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from mindspeed_cp.cost.bounds import Floor, even_floor, exchange_floor, plan_floor
from mindspeed_cp.cost.candidates import Candidate, candidates
from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.cost.compute import ComputeCost, LayerCost
from mindspeed_cp.cost.memory import layer_bytes
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

#: Algorithms whose ranks take keys from their owners; what they take at least is known without their plan.
EXCHANGES = ("direct", "all_gather")


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
    if not batches:
        raise ConfigError("batches: there are none to choose by; valid: one or more")
    cluster = cluster_of(topology) if cluster is None else fitted(cluster, topology.ranks_per_node)
    cost = ComputeCost(cluster, attention, layer)
    trial = _Trial(batches, topology, cost, cluster.memory if memory is None else memory, options or {})
    tried = [trial.run(one) for one in (candidates(topology, attention) if among is None else among)]
    full = [one for one in tried if len(one.seconds) == len(batches) and one.refused is None]
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
        self._known: dict[bytes, tuple[Candidate, Timeline]] = {}  # who had a plan first, and its timeline

    def run(self, candidate: Candidate) -> Tried:
        """A candidate on all batches, or until it cannot be the fastest."""
        tried, plans, owners = Tried(candidate), [], set()
        try:
            for number, batch in enumerate(self._batches):
                before, after = sum(tried.seconds), sum(self._even[number + 1 :])
                if candidate.algorithm in EXCHANGES:
                    layout = dict(candidate.options).get("layout", "zigzag")
                    floor = exchange_floor(batch, self._topology, self._cost, layout)
                    if before + floor.seconds + after > self._best:
                        return _dropped(tried, number, floor)
                plan = self._plan(candidate, batch)
                key = _identity(plan)
                if key not in self._known:
                    floor = plan_floor(plan, self._cost)
                    if before + floor.seconds + after > self._best:
                        return _dropped(tried, number, floor)
                    timeline = simulate(plan, self._cost.cluster, self._cost.layer, MOST_SPANS)
                    self._known[key] = candidate, timeline
                owner, made = self._known[key]
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
            held = max(int(layer_bytes(plan, self._cost.layer.bytes_per_element).max()) for plan in plans)
            if held > self._memory:
                said = f"holds {held / 2**30:.3g} GiB in one layer; there are {self._memory / 2**30:.3g}"
                return replace(tried, refused=said)
            self._best = total
        return replace(tried, same_as=owners.pop() if len(owners) == 1 and candidate not in owners else None)

    def _plan(self, candidate: Candidate, batch: Documents) -> Plan:
        """A candidate's plan of a batch."""
        known = algorithm_options(candidate.algorithm)
        given = {name: value for name, value in self._options.items() if name in known} | dict(candidate.options)
        return build_plan(batch, self._topology, self._cost.attention, candidate.algorithm, **given)


def _dropped(tried: Tried, number: int, floor: Floor) -> Tried:
    """At a batch of which only the floor is known."""
    return replace(tried, looked_at=number + 1, least=sum(tried.seconds) + floor.seconds, cause=floor.cause)


def _identity(plan: Plan) -> bytes:
    """Equal for plans that do the same."""
    found = blake2b(digest_size=16)
    for one in (plan, *plan.parts):
        arrays: list[np.ndarray] = [
            layout.spans for layout in (one.layout, one.layout_kv, one.q_layout, one.kv_layout, one.linear) if layout
        ]
        for program in (one.forward, one.backward):
            arrays += [program.capacity, program.contents, program.spans]
            for messages in (program.fetch, program.reduce):
                arrays += [messages.items, messages.runs]
        for array in arrays:
            found.update(repr(array.shape).encode())
            found.update(np.ascontiguousarray(array).data)
    others = plan.documents.lengths.tobytes(), plan.order, plan.order_backward, plan.linear is None
    found.update(repr(others).encode())
    return found.digest()
