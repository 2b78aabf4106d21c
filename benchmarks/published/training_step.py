"""A training step from layers: micro-batches one after the other, replicas beside each other, gradients reduced at the
end. Modelled like the layers that it is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.cost.compute import ComputeCost, LayerCost
from mindspeed_cp.cost.kernels import TileCounter, stand_ins
from mindspeed_cp.cost.linear import linear_seconds, with_projections
from mindspeed_cp.cost.links import Links
from mindspeed_cp.cost.simulate import fitted, run
from mindspeed_cp.cost.transfers import transfers
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.program import Plan

#: Layers that are simulated one by one; in those after them ranks are as far apart as in the last of these.
SETTLED = 4


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch of one replica through all layers, modelled.

    Attributes:
        seconds: until its last rank is done.
        layer_backward: of that, the backward of one layer.
        plan: of its batch.
    """

    seconds: float
    layer_backward: float
    plan: Plan


@dataclass(frozen=True, eq=False)
class Step:
    """One training step, modelled.

    Attributes:
        total: seconds until all replicas have the reduced gradients.
        replicas: seconds of each replica until its last micro-batch is done, fp64 [replicas].
        waiting: of the replicas, for the slowest, fp64 [replicas]; where every micro-batch is waited for, at each.
        reduction: seconds that the reduction of gradients takes.
        exposed_reduction: of these, those after the last backward.
    """

    total: float
    replicas: np.ndarray
    waiting: np.ndarray
    reduction: float
    exposed_reduction: float


def simulate_layers(plan: Plan, cluster: Cluster, layers: int, layer: LayerCost | None = None) -> MicroBatch:
    """A micro-batch through several equal layers: forward through all, then backward through all.

    Ranks begin a layer when they are done with the one before, so that differences between them add up or even out. Up
    to four layers are simulated one by one; each one after these takes as long as the last one of them.

    Args:
        plan, cluster, layer: as for :func:`mindspeed_cp.cost.simulate`.
        layers: of this pipeline stage.

    Raises:
        ConfigError: `layers` is below 1, or the cluster's nodes have too few ranks.
    """
    _check_layers(layers)
    cluster = fitted(cluster, plan.topology.ranks_per_node)
    cost = ComputeCost(cluster, plan.attention, layer)
    tiles, now = TileCounter(plan, stand_ins(plan)), np.zeros(plan.ranks)
    last_backward = 0.0
    for name, backward in (("forward", False), ("backward", True)):
        linear = linear_seconds(plan, cost, backward)
        kernels = with_projections(tiles.work(name).seconds(cost, backward), linear, plan)
        table, links = transfers(plan, name, cost.layer), Links(cluster, plan.topology.nodes)
        for _ in range(min(layers, SETTLED)):
            before = now
            begin = now + linear.rest if backward else now
            now = run(kernels, table, links, begin)[0][:, -1, 2]
            now = now if backward else now + linear.rest
        step = float(now.max() - before.max())
        now = now + step * max(layers - SETTLED, 0)
        links.free += step * max(layers - SETTLED, 0)
        last_backward = step
    return MicroBatch(float(now.max()), last_backward, plan)


def _check_layers(layers: object) -> None:
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ConfigError(f"layers is {layers!r}; valid: a whole number from 1")


def reduction_seconds(gradient_bytes: float, cluster: Cluster, ranks: int) -> float:
    """Reduce-scatter and all-gather of gradients over ranks, as rings that pass each link once in each direction.

    2 * bytes * (n - 1) / n over the slowest link: in a node a rank's in-node links; between nodes all NICs of a node,
    over which as many rings run side by side. The latencies of the rings' steps are left out.

    Args:
        gradient_bytes: of one rank, before the reduction.
        cluster: the links.
        ranks: that reduce: data-parallel times context-parallel ones.
    """
    if ranks <= 1:
        return 0.0
    rate = cluster.effective_rank
    if ranks > cluster.ranks_per_node:
        rate = min(rate, cluster.effective_nic * cluster.nics_per_node)
    return 2 * gradient_bytes * (ranks - 1) / ranks / rate


def simulate_step(
    replicas: Sequence[Sequence[MicroBatch]],
    cluster: Cluster,
    gradient_bytes: float = 0.0,
    layers: int = 1,
    overlap: bool = True,
    together: bool = False,
) -> Step:
    """A training step.

    Args:
        replicas: for each data-parallel replica its micro-batches, in order (:func:`simulate_layers`); one without any
            waits for the others.
        cluster: for the reduction; where plans span nodes, as many ranks of a node are in use as theirs.
        gradient_bytes: gradients of one rank; 0 leaves the reduction out.
        layers: of the model, in whose buckets gradients are reduced.
        overlap: buckets travel beside the last backward; False: all after it.
        together: replicas wait for each other in every micro-batch, as where experts are spread over them.

    Raises:
        ConfigError: no replicas, a number out of range; or, with `together`, replicas have different numbers of
            micro-batches.
    """
    _check_layers(layers)
    if not (math.isfinite(gradient_bytes) and gradient_bytes >= 0):
        raise ConfigError(f"gradient_bytes is {gradient_bytes!r}; valid: bytes, 0 or more")
    if not replicas or not any(len(one) for one in replicas):
        raise ConfigError("replicas: there is no micro-batch; valid: one replica or more, with one micro-batch or more")
    seconds = [np.array([micro.seconds for micro in one]) for one in replicas]
    if together:
        if len({len(one) for one in seconds}) > 1:
            raise ConfigError(
                f"replicas have {', '.join(str(len(one)) for one in seconds)} micro-batches; valid with together=True: "
                "equally many"
            )
        slowest = np.max(seconds, axis=0)
        done = np.full(len(seconds), slowest.sum())
        waiting = np.array([(slowest - one).sum() for one in seconds])
    else:
        done = np.array([one.sum() for one in seconds])
        waiting = done.max() - done
    first = next(one[0].plan for one in replicas if len(one))
    place = first.topology  # one on a node shares it with other replicas; one on several has so many of each
    fits = cluster if place.nodes == 1 else fitted(cluster, place.ranks_per_node)
    reduction = reduction_seconds(gradient_bytes, fits, len(replicas) * first.ranks)
    exposed = reduction
    if overlap:
        last = next(one[-1] for at, one in sorted(zip(done, replicas, strict=True), key=lambda x: -x[0]) if len(one))
        exposed = max(reduction / layers, reduction - last.layer_backward * (layers - 1))
    return Step(float(done.max()) + exposed, done, waiting, reduction, exposed)
