"""Modelled layers of one plan on several clusters: tiles are counted once, messages are timed for each cluster.

The arithmetic is that of :func:`mindspeed_cp.simulate.simulator.simulate_plan`, as tests check. In addition, some ranks
can represent others with equal work, since counting tiles takes long, and links can differ from the cluster's queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mindspeed_cp import AttentionConfig
from mindspeed_cp.cluster import Cluster, ComputeCost
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.transfers import PAIR_STREAMS, transfers
from mindspeed_cp.simulate.link_queues import LinkQueues
from mindspeed_cp.simulate.simulator import linear_times, simulate_direction, with_projections
from mindspeed_cp.simulate.tile_work import TileCounter, TileWork

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer, forward and backward, modelled.

    Attributes:
        total: seconds until the last rank is done.
        busy: seconds of kernels, linear layers and posting of each rank, fp64 [ranks].
        exposed: seconds in which each rank waits for messages that are due, fp64 [ranks].
    """

    total: float
    busy: np.ndarray
    exposed: np.ndarray

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest rank over the mean; 1 is even."""
        return float(self.busy.max() / self.busy.mean())


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way in which a system could run a batch.

    Attributes:
        label: of its options, for the table.
        plan: who holds, sends and computes what.
        representative: see :class:`mindspeed_cp.simulate.tile_work.TileCounter`.
        links: makes the links of a cluster's nodes.
        counted: tiles by direction, as far as they were counted; several candidates with the same tiles may share it.
    """

    label: str
    plan: Plan
    representative: np.ndarray | None = None
    links: Callable[[Cluster, int], LinkQueues] = LinkQueues
    counted: dict[str, TileWork] = field(default_factory=dict, repr=False)

    def tiles(self, direction: str) -> TileWork:
        """Return the tiles of the plan; those of both directions are counted at the first call."""
        if direction not in self.counted:
            counter = TileCounter(self.plan, self.representative)
            self.counted.update({name: counter.work(name) for name in DIRECTIONS})
        return self.counted[direction]

    def with_attention(self, attention: AttentionConfig) -> Candidate:
        """Return the same with other numbers of heads, for plans that split none: neither who sends and computes what
        nor the tiles depend on them."""
        return replace(self, plan=replace(self.plan, attention=attention))

    def least(self, cluster: Cluster) -> float:
        """Return the seconds that a layer takes at least: those of the busiest rank, if tiles were as fast as they can
        be and nothing had to be waited for. Causal masks."""
        plan, cost = self.plan, ComputeCost(cluster, self.plan.attention)
        work = np.zeros(plan.ranks)
        for part in plan.parts_or_self:
            spans, heads = (
                part.q_layout_compute.spans,
                part.q_layout_compute.head_counts(plan.attention.heads),
            )
            first = part.q_layout_compute.documents.offsets[spans["doc"]]
            begin, end = (spans["start"] - first).astype(float), (spans["stop"] - first).astype(float)
            seen = (end * (end + 1) - begin * (begin + 1)) / 2
            work += np.bincount(spans["rank"], seen, plan.ranks) * heads / plan.attention.heads
        busy = np.zeros(plan.ranks)
        for backward in (False, True):
            busy += cost.attention_seconds(work, np.inf, 0, backward) + linear_times(plan, cost, backward).total
        return float(busy.max())


def layer(candidate: Candidate, cluster: Cluster) -> Layer:
    """Time one layer of a candidate.

    Args:
        candidate: a plan.
        cluster: where it runs.
    """
    plan = candidate.plan
    cluster = cluster.with_ranks(plan.topology.ranks_per_node)
    cost = ComputeCost(cluster, plan.attention)
    now, busy, exposed = np.zeros((3, plan.ranks))
    for name in DIRECTIONS:
        backward = name == "backward"
        linear = linear_times(plan, cost, backward)
        kernels = with_projections(candidate.tiles(name).seconds(cost, backward), linear, plan)
        table = transfers(plan, name, cost.layer.bytes_per_element, cost.layer.hidden_row_bytes)
        begin = now + linear.rest if backward else now
        links = candidate.links(cluster, plan.topology.nodes)
        steps, _ = simulate_direction(kernels, table, links, begin, plan.algorithm not in PAIR_STREAMS)
        busy += (steps[:, :, 1] - steps[:, :, 0]).sum(1) + linear.rest
        exposed += (steps[:, :, 2] - steps[:, :, 1]).sum(1)
        now = steps[:, -1, 2] + (0.0 if backward else linear.rest)
    return Layer(float(now.max()), busy, exposed)


def fastest(candidates: Sequence[Candidate], cluster: Cluster) -> tuple[Candidate, Layer]:
    """Return the candidate whose layer takes least, and that layer. Those whose busiest rank alone has more to do than
    the best one takes are not timed."""
    floors = [candidate.least(cluster.with_ranks(candidate.plan.topology.ranks_per_node)) for candidate in candidates]
    best: tuple[Candidate, Layer] | None = None
    for number in np.argsort(floors, kind="stable").tolist():
        if best is not None and floors[number] >= best[1].total:
            break
        candidate_layer = layer(candidates[number], cluster)
        if best is None or candidate_layer.total < best[1].total:
            best = candidates[number], candidate_layer
    assert best is not None, "there is a candidate"
    return best
