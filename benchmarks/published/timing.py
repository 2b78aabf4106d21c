"""Layers and steps of one plan on several clusters: its tiles are counted once, its messages timed for each.

The same arithmetic as :func:`mindspeed_cp.cost.simulate.simulate` and :func:`mindspeed_cp.cost.step.simulate_layers`,
to which the tests hold it. What is added: where ranks do alike, some can stand for others, since tiles are what takes
long; links can be others than the cluster's own queues; and gradients of keys can travel in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mindspeed_cp import AttentionConfig
from mindspeed_cp.cost import Cluster, ComputeCost
from mindspeed_cp.cost.kernels import TileCounter, TileWork
from mindspeed_cp.cost.linear import linear_seconds, with_projections
from mindspeed_cp.cost.links import Links
from mindspeed_cp.cost.simulate import fitted, run
from mindspeed_cp.cost.step import SETTLED, MicroBatch
from mindspeed_cp.cost.transfers import GRADIENT, GRADIENTS, heads_of, transfers
from mindspeed_cp.plan import Plan

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer, forward and backward, modelled.

    Attributes:
        total: seconds until the last rank is done.
        busy: seconds of kernels and linear layers of each rank, fp64 [ranks].
        exposed: seconds in which each rank waits for messages that are due, fp64 [ranks].
    """

    total: float
    busy: np.ndarray
    exposed: np.ndarray

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest rank over the mean, less one."""
        return float(self.busy.max() / self.busy.mean()) - 1


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way in which a system could run a batch.

    Attributes:
        label: of its options, for the table.
        plan: who holds, sends and computes what.
        stands: see :class:`mindspeed_cp.cost.kernels.TileCounter`.
        links: makes the links of a cluster's nodes.
        counted: tiles by direction, as far as they were counted; several candidates with the same tiles may share it.
    """

    label: str
    plan: Plan
    stands: np.ndarray | None = None
    links: Callable[[Cluster, int], Links] = Links
    counted: dict[str, TileWork] = field(default_factory=dict, repr=False)

    def tiles(self, direction: str) -> TileWork:
        """Of the plan; those of both directions are counted at the first call."""
        if direction not in self.counted:
            counter = TileCounter(self.plan, self.stands)
            self.counted.update({name: counter.work(name) for name in DIRECTIONS})
        return self.counted[direction]

    def with_attention(self, attention: AttentionConfig) -> Candidate:
        """The same with other numbers of heads, for plans that split none: neither who sends and computes what nor the
        tiles depend on them."""
        return replace(self, plan=replace(self.plan, attention=attention))

    def least(self, cluster: Cluster) -> float:
        """Seconds that a layer takes at least: those of the busiest rank, if tiles were as fast as they can be and
        nothing had to be waited for. Causal masks."""
        plan, cost = self.plan, ComputeCost(cluster, self.plan.attention)
        work = np.zeros(plan.ranks)
        for piece in plan.pieces:
            spans, heads = piece.q_layout.spans, heads_of(piece.q_layout, plan.attention.heads)
            first = piece.q_layout.documents.offsets[spans["doc"]]
            begin, end = (spans["start"] - first).astype(float), (spans["stop"] - first).astype(float)
            seen = (end * (end + 1) - begin * (begin + 1)) / 2
            work += np.bincount(spans["rank"], seen, plan.ranks) * heads / plan.attention.heads
        busy = np.zeros(plan.ranks)
        for backward in (False, True):
            busy += cost.attention_seconds(work, np.inf, 0, backward) + linear_seconds(plan, cost, backward).total
        return float(busy.max())


def layer(candidate: Candidate, cluster: Cluster, gradient: int = GRADIENT) -> Layer:
    """One layer of a candidate.

    Args:
        candidate: a plan.
        cluster: where it runs.
        gradient: bytes of one number of the gradients of keys and values that travel between steps.
    """
    plan = candidate.plan
    cluster = fitted(cluster, plan.topology.ranks_per_node)
    cost = ComputeCost(cluster, plan.attention)
    now, busy, exposed = np.zeros((3, plan.ranks))
    for name in DIRECTIONS:
        backward = name == "backward"
        linear = linear_seconds(plan, cost, backward)
        kernels = with_projections(candidate.tiles(name).seconds(cost, backward), linear, plan)
        table = _table(plan, name, cost, gradient)
        begin = now + linear.rest if backward else now
        turns, computed, _ = run(kernels, table, candidate.links(cluster, plan.topology.nodes), begin)
        busy += computed + linear.rest
        exposed += (turns[:, :, 2] - turns[:, :, 1]).sum(1)
        now = turns[:, -1, 2] + (0.0 if backward else linear.rest)
    return Layer(float(now.max()), busy, exposed)


def fastest(candidates: Sequence[Candidate], cluster: Cluster, gradient: int = GRADIENT) -> tuple[Candidate, Layer]:
    """The candidate whose layer takes least, and that layer. Those whose busiest rank alone has more to do than the
    best one takes are not timed."""
    floors = [one.least(fitted(cluster, one.plan.topology.ranks_per_node)) for one in candidates]
    best: tuple[Candidate, Layer] | None = None
    for number in np.argsort(floors, kind="stable").tolist():
        if best is not None and floors[number] >= best[1].total:
            break
        found = layer(candidates[number], cluster, gradient)
        if best is None or found.total < best[1].total:
            best = candidates[number], found
    assert best is not None, "there is a candidate"
    return best


def through_layers(candidate: Candidate, cluster: Cluster, layers: int, gradient: int = GRADIENT) -> MicroBatch:
    """A micro-batch through several equal layers, as :func:`mindspeed_cp.cost.step.simulate_layers` has it; for
    `gradient` see :func:`layer`."""
    plan = candidate.plan
    cluster = fitted(cluster, plan.topology.ranks_per_node)
    cost = ComputeCost(cluster, plan.attention)
    now, last = np.zeros(plan.ranks), 0.0
    for name in DIRECTIONS:
        backward = name == "backward"
        linear = linear_seconds(plan, cost, backward)
        kernels = with_projections(candidate.tiles(name).seconds(cost, backward), linear, plan)
        table, links = _table(plan, name, cost, gradient), candidate.links(cluster, plan.topology.nodes)
        for _ in range(min(layers, SETTLED)):
            before = now
            now = run(kernels, table, links, now + linear.rest if backward else now)[0][:, -1, 2]
            now = now if backward else now + linear.rest
        last = float(now.max() - before.max())
        now = now + last * max(layers - SETTLED, 0)
        links.free += last * max(layers - SETTLED, 0)
    return MicroBatch(float(now.max()), last, plan)


def _table(plan: Plan, direction: str, cost: ComputeCost, gradient: int) -> np.ndarray:
    table = transfers(plan, direction, cost.layer)
    if gradient != GRADIENT:
        table["bytes"][table["kind"] == GRADIENTS] *= gradient / GRADIENT
    return table
