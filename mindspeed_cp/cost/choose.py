"""Which algorithm, with which options, for given batches: every candidate's plan is built and simulated.

The hierarchical plan is simulated first. Another candidate whose links alone, each with all its bytes in a row, or
whose attention alone, evenly spread, take longer than the best so far needs no simulation. After the first batch only
candidates that are near the best stay in the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_cp.cost.cluster import Cluster, load_cluster
from mindspeed_cp.cost.compute import ComputeCost, LayerCost
from mindspeed_cp.cost.links import Links
from mindspeed_cp.cost.memory import layer_bytes
from mindspeed_cp.cost.simulate import fitted, simulate
from mindspeed_cp.cost.timeline import Timeline
from mindspeed_cp.cost.transfers import transfers
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.build import algorithm_options, build_plan
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.placement import visible_pairs
from mindspeed_cp.plan.program import Plan

#: Candidates that are slower than the best of the first batch by more than this are not tried on the others.
NEAR = 1.3

#: Tiles are counted on some ranks alone where there are more spans of keys than this: choosing must be quick.
MOST_SPANS = 2**16


@dataclass(frozen=True)
class Candidate:
    """An algorithm and those of its options that differ from the defaults, as (name, value)."""

    algorithm: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        said = ", ".join(
            f"{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in self.options
        )
        return f"{self.algorithm} ({said})" if said else self.algorithm


@dataclass(frozen=True, eq=False)
class Tried:
    """What became of a candidate.

    Attributes:
        candidate: the algorithm and its options.
        seconds: modelled, of one layer, for each batch that it was tried on.
        timeline: of the first batch; None where it was not simulated.
        left_out: why it was not, or not on all batches; None for one that was.
    """

    candidate: Candidate
    seconds: tuple[float, ...] = ()
    timeline: Timeline | None = field(default=None, repr=False)
    left_out: str | None = None


@dataclass(frozen=True, eq=False)
class Decision:
    """The choice for some batches.

    Attributes:
        candidate: the fastest over all batches.
        tried: all candidates, the fastest first.
        reasons: three lines: what was chosen, why it is faster, what was not.
    """

    candidate: Candidate
    tried: tuple[Tried, ...]
    reasons: tuple[str, str, str]


def candidates(topology: Topology, attention: AttentionConfig) -> list[Candidate]:
    """All that are worth trying on these ranks."""
    ranks, here = topology.ranks, topology.ranks_per_node
    if ranks == 1:
        return [Candidate("ring")]
    found = [Candidate("hierarchical")]
    if topology.nodes > 1:
        found += [Candidate("hierarchical", (("routing", False),)), Candidate("hierarchical", (("remap", "off"),))]
    degrees = [d for d in range(2, min(here, attention.heads) + 1) if here % d == 0 and d < ranks]
    found += [Candidate("hybrid", (("ulysses_degree", d),)) for d in reversed(degrees)]
    if attention.heads >= ranks:
        found.append(Candidate("ulysses"))
    found += [Candidate("direct", (("layout", "balanced"),)), Candidate("all_gather"), Candidate("direct")]
    if topology.nodes > 1 and here > 1:
        found.append(Candidate("double_ring"))
    return [*found, Candidate("ring")]


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
        among: candidates; default: :func:`candidates`.
        options: of the model, such as hidden_size, for the algorithms that have them.

    Returns:
        Deterministic: the same on every rank that asks the same.

    Raises:
        ConfigError: there is no batch, or no candidate can do it; says why for each.
    """
    if not batches:
        raise ConfigError("batches: there are none to choose by; valid: one or more")
    cluster = fitted(cluster or load_cluster(topology.cluster or "a2"), topology.ranks_per_node)
    cost = ComputeCost(cluster, attention, layer)
    where = _Where(topology, cost, cluster.memory if memory is None else memory, options or {})
    tried = []
    best = float("inf")
    for candidate in candidates(topology, attention) if among is None else among:
        result = _try(candidate, batches[0], where, best)
        best = min(best, *result.seconds) if result.seconds else best
        tried.append(result)
    if best == float("inf"):
        reasons = "; ".join(f"{one.candidate}: {one.left_out}" for one in tried)
        raise ConfigError(f"algorithm is 'auto': nothing can do this batch: {reasons}")
    if len(batches) > 1:
        tried = [_on_others(one, batches[1:], where, best) for one in tried]
    full = [one for one in tried if len(one.seconds) == len(batches)]
    full.sort(key=lambda one: sum(one.seconds))  # stable: of equally fast ones the first candidate
    others = [one for one in tried if len(one.seconds) < len(batches)]
    others.sort(key=lambda one: one.seconds or (float("inf"),))
    if not full:
        reasons = "; ".join(f"{one.candidate}: {one.left_out}" for one in others)
        raise ConfigError(f"algorithm is 'auto': nothing can do all of these batches: {reasons}")
    return Decision(full[0].candidate, (*full, *others), _reasons(full, others))


@dataclass(frozen=True, eq=False)
class _Where:
    """What all candidates are tried on; fields as the arguments of `choose_algorithm`."""

    topology: Topology
    cost: ComputeCost
    memory: float
    options: dict[str, Any]

    def plan(self, candidate: Candidate, batch: Documents) -> Plan:
        """A candidate's plan of a batch."""
        known = algorithm_options(candidate.algorithm)
        given = {name: value for name, value in self.options.items() if name in known} | dict(candidate.options)
        return build_plan(batch, self.topology, self.cost.attention, candidate.algorithm, **given)


def _try(candidate: Candidate, batch: Documents, where: _Where, best: float) -> Tried:
    """A candidate on one batch, unless it cannot do it or cannot be the best."""
    cost, memory = where.cost, where.memory
    try:
        plan = where.plan(candidate, batch)
    except ConfigError as error:
        return Tried(candidate, left_out=str(error))
    if best < float("inf"):
        least = lower_bound(plan, cost)
        if least > NEAR * best:
            return Tried(candidate, left_out=f"takes {1e3 * least:.3g} ms at least, its busiest link alone")
    held = int(layer_bytes(plan).max())
    if held > memory:
        return Tried(candidate, left_out=f"holds {held / 2**30:.3g} GiB in one layer; there are {memory / 2**30:.3g}")
    made = simulate(plan, cost.cluster, cost.layer, MOST_SPANS)
    return Tried(candidate, (made.total,), made)


def _on_others(one: Tried, batches: Sequence[Documents], where: _Where, best: float) -> Tried:
    """A candidate that was near the best on the first batch, on the others."""
    if not one.seconds:
        return one
    if one.seconds[0] > NEAR * best:
        return Tried(
            one.candidate, one.seconds, one.timeline, f"{one.seconds[0] / best:.3g} times as slow on the first batch"
        )
    seconds = list(one.seconds)
    for batch in batches:
        other = _try(one.candidate, batch, where, float("inf"))
        if not other.seconds:
            return Tried(one.candidate, tuple(seconds), one.timeline, other.left_out)
        seconds += other.seconds
    return Tried(one.candidate, tuple(seconds), one.timeline)


def lower_bound(plan: Plan, cost: ComputeCost) -> float:
    """Seconds of one layer that a plan cannot do without: in each direction its busiest link, all bytes in a row, and
    evenly spread linear layers between the two."""
    tokens = plan.documents.tokens / plan.ranks
    total = float(cost.linear_seconds(tokens) + cost.linear_seconds(tokens, backward=True))
    pairs = visible_pairs(plan.documents, plan.kv_documents, plan.attention).sum() / plan.ranks
    for direction, backward in (("forward", False), ("backward", True)):
        links, table = Links(cost.cluster, plan.topology.nodes), transfers(plan, direction, cost.layer)
        links.serve(table["src"], table["dst"], table["bytes"], np.zeros(len(table)))
        total += max(float(links.busy.max()), float(cost.attention_seconds(pairs, 1e12, 0, backward)))
    return total


def _reasons(full: list[Tried], others: list[Tried]) -> tuple[str, str, str]:
    """What was chosen, why it is faster than the second, and what is not among the two."""
    first = full[0]
    mean = 1e3 * sum(first.seconds) / len(first.seconds)
    batches = f" (mean of {len(first.seconds)} batches)" if len(first.seconds) > 1 else ""
    simulated = [*full[1:], *(one for one in others if one.seconds)]
    if not simulated:
        return (
            f"{first.candidate}: {mean:.3g} ms a layer{batches}, modelled",
            "it is the only one that was simulated",
            _left(others, None),
        )
    second = simulated[0]
    count = len(second.seconds)
    ratio = sum(second.seconds) / sum(first.seconds[:count])
    one, two = first.timeline, second.timeline
    assert one is not None and two is not None  # both were simulated
    return (
        f"{first.candidate}: {mean:.3g} ms a layer{batches}, modelled for {one.cluster.name}; the second, "
        f"{second.candidate}, takes {ratio:.2f} times as long",
        f"on the first batch its mean rank computes {1e3 * float((one.compute + one.linear).mean()):.3g} ms and waits "
        f"{1e3 * float(one.waiting.mean()):.3g} ms; with {second.candidate} "
        f"{1e3 * float((two.compute + two.linear).mean()):.3g} and {1e3 * float(two.waiting.mean()):.3g} ms",
        _left([*simulated[1:], *(other for other in others if not other.seconds)], first),
    )


def _left(others: list[Tried], first: Tried | None) -> str:
    """The others, in one line."""
    if not others:
        return "there is no other candidate"
    said = []
    for one in others:
        if one.left_out is not None and not one.seconds:
            said.append(f"{one.candidate}: {one.left_out}")
        elif first is not None:
            said.append(
                f"{one.candidate}: {sum(one.seconds) / sum(first.seconds[: len(one.seconds)]):.2f} times as long"
            )
    return "others: " + "; ".join(said)
