"""Training steps of a system: its batches as micro-batches through all layers, rows as replicas.

The reduction of gradients and the optimizer are left out: they are the same for all, and the former travels beside the
last backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.published.bases import Place, Timed
from benchmarks.published.timing import Candidate, layer
from benchmarks.published.training_step import MicroBatchTime, simulate_layers, simulate_step
from mindspeed_cp.cluster import Cluster
from mindspeed_cp.plan.transfers import GRADIENT_BYTES

#: Of the model.
LAYERS = 32


def _micro_batch(candidate: Candidate, cluster: Cluster, gradient: int) -> MicroBatchTime:
    """Time a micro-batch through all layers."""
    plan = candidate.plan
    if candidate.free_transfers:  # its layers have no order of steps, and follow each other
        seconds = LAYERS * layer(candidate, cluster, gradient).total
        return MicroBatchTime(seconds, seconds / LAYERS, plan)
    return simulate_layers(plan, cluster, LAYERS, tiles=candidate.tiles, links=candidate.links, gradient=gradient)


def step_seconds(batches: Sequence[Timed], place: Place, gradient: int = GRADIENT_BYTES) -> float:
    """Time one step.

    Args:
        batches: what the system made of each micro-batch; all as one pool, or all as so many rows.
        place: where.
        gradient: see :func:`.timing.layer`.
    """
    count = max(len(timed.chosen) for timed in batches)
    replicas: list[list[MicroBatchTime]] = [[] for _ in range(count)]
    cluster = None
    for timed in batches:
        for number, candidate in enumerate(timed.chosen):
            truth = place.truth(place.case(candidate.plan.documents, candidate.plan.ranks).cluster)
            cluster = truth
            micro = _micro_batch(candidate, truth, gradient)
            # A pool among rows keeps every replica's ranks busy for as long.
            for replica in replicas if timed.pooled else [replicas[number]]:
                replica.append(micro)
    assert cluster is not None
    return simulate_step(replicas, cluster, layers=LAYERS).total
