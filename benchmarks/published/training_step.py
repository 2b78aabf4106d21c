"""Modelled time of a training step: micro-batches one after the other, replicas in parallel, then the reduction of
gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cluster.cluster import Cluster
from mindspeed_cp.cluster.compute import ComputeCost, LayerCost
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.transfers import GRADIENT_BYTES, GRADIENTS, transfers
from mindspeed_cp.simulate.linear_times import linear_times, with_projections
from mindspeed_cp.simulate.link_queues import LinkQueues
from mindspeed_cp.simulate.simulator import simulate_direction
from mindspeed_cp.simulate.tile_work import TileCounter, TileWork, representative_ranks

#: Layers that are simulated one by one; in those after them ranks are as far apart as in the last of these.
SIMULATED_LAYERS = 4


@dataclass(frozen=True, eq=False)
class MicroBatchTime:
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
class TrainingStep:
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


def simulate_layers(
    plan: Plan,
    cluster: Cluster,
    layers: int,
    layer: LayerCost | None = None,
    tiles: Callable[[str], TileWork] | None = None,
    links: Callable[[Cluster, int], LinkQueues] = LinkQueues,
    gradient: int = GRADIENT_BYTES,
) -> MicroBatchTime:
    """Simulate a micro-batch through several equal layers: forward through all, then backward through all.

    Ranks begin a layer when they are done with the one before, so that differences between them add up or even out. Up
    to four layers are simulated one by one; each one after these takes as long as the last one of them.

    Args:
        plan, cluster, layer: as for :func:`mindspeed_cp.simulate_plan`.
        layers: layers of this pipeline stage.
        tiles: tiles of the plan by direction; None: counted here.
        links: makes the links of a cluster from its number of nodes.
        gradient: bytes of one number of the gradients of keys and values that travel between steps.

    Raises:
        ConfigError: `layers` is below 1, or the cluster's nodes have too few ranks.
    """
    _check_layers(layers)
    cluster = cluster.with_ranks(plan.topology.ranks_per_node)
    cost = ComputeCost(cluster, plan.attention, layer)
    tiles = TileCounter(plan, representative_ranks(plan)).work if tiles is None else tiles
    now, last_backward = np.zeros(plan.ranks), 0.0
    for name, backward in (("forward", False), ("backward", True)):
        linear = linear_times(plan, cost, backward)
        kernels = with_projections(tiles(name).seconds(cost, backward), linear, plan)
        table, queues = transfer_table(plan, name, cost, gradient), links(cluster, plan.topology.nodes)
        for _ in range(min(layers, SIMULATED_LAYERS)):
            before = now
            begin = now + linear.rest if backward else now
            now = simulate_direction(kernels, table, queues, begin)[0][:, -1, 2]
            now = now if backward else now + linear.rest
        step = float(now.max() - before.max())
        now = now + step * max(layers - SIMULATED_LAYERS, 0)
        queues.free_at += step * max(layers - SIMULATED_LAYERS, 0)
        last_backward = step
    return MicroBatchTime(float(now.max()), last_backward, plan)


def transfer_table(plan: Plan, direction: str, cost: ComputeCost, gradient: int = GRADIENT_BYTES) -> np.ndarray:
    """Return the transfers of a direction, with gradients of `gradient` bytes per number."""
    table = transfers(plan, direction, cost.layer.bytes_per_element, cost.layer.hidden_row_bytes)
    if gradient != GRADIENT_BYTES:
        table["bytes"][table["kind"] == GRADIENTS] *= gradient / GRADIENT_BYTES
    return table


def _check_layers(layers: object) -> None:
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ConfigError(f"layers is {layers!r}; valid: a whole number from 1")


def simulate_step(
    replicas: Sequence[Sequence[MicroBatchTime]],
    cluster: Cluster,
    gradient_bytes: float = 0.0,
    layers: int = 1,
    overlap: bool = True,
    together: bool = False,
) -> TrainingStep:
    """Simulate a training step.

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
    if not replicas or not any(len(micro_batches) for micro_batches in replicas):
        raise ConfigError("replicas: there is no micro-batch; valid: one replica or more, with one micro-batch or more")
    seconds = [np.array([micro.seconds for micro in micro_batches]) for micro_batches in replicas]
    if together:
        if len(set(map(len, seconds))) > 1:
            raise ConfigError(
                f"replicas have {', '.join(str(len(times)) for times in seconds)} micro-batches; valid with "
                "together=True: equally many"
            )
        slowest = np.max(seconds, axis=0)
        done = np.full(len(seconds), slowest.sum())
        waiting = np.array([(slowest - times).sum() for times in seconds])
    else:
        done = np.array([times.sum() for times in seconds])
        waiting = done.max() - done
    first = next(micro_batches[0].plan for micro_batches in replicas if len(micro_batches))
    topology = first.topology  # one on a node shares it with other replicas; one on several has so many of each
    fits = cluster if topology.nodes == 1 else cluster.with_ranks(topology.ranks_per_node)
    reduction = fits.reduction_seconds(gradient_bytes, len(replicas) * first.ranks)
    exposed = reduction
    if overlap:
        last = next(
            micro_batches[-1]
            for seconds_of_replica, micro_batches in sorted(zip(done, replicas, strict=True), key=lambda x: -x[0])
            if len(micro_batches)
        )
        exposed = max(reduction / layers, reduction - last.layer_backward * (layers - 1))
    return TrainingStep(float(done.max()) + exposed, done, waiting, reduction, exposed)
