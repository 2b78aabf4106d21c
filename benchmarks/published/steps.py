"""Training steps of a system: its batches as micro-batches through all layers, rows as replicas.

The reduction of gradients and the optimizer are left out: they are the same for all, and the former travels beside the
last backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.published.bases import Place, Timed
from benchmarks.published.timing import through_layers
from mindspeed_cp.cost.step import MicroBatch, simulate_step
from mindspeed_cp.cost.transfers import GRADIENT

#: Of the model.
LAYERS = 32


def step_seconds(batches: Sequence[Timed], place: Place, gradient: int = GRADIENT) -> float:
    """One step.

    Args:
        batches: what the system made of each micro-batch; all as one pool, or all as so many rows.
        place: where.
        gradient: see :func:`.timing.layer`.
    """
    count = max(len(one.chosen) for one in batches)
    replicas: list[list[MicroBatch]] = [[] for _ in range(count)]
    cluster = None
    for one in batches:
        for number, candidate in enumerate(one.chosen):
            truth = place.truth(place.case(candidate.plan.documents, candidate.plan.ranks).cluster)
            cluster = truth
            micro = through_layers(candidate, truth, LAYERS, gradient)
            # A pool among rows keeps every replica's ranks busy for as long.
            for replica in replicas if one.pooled else [replicas[number]]:
                replica.append(micro)
    assert cluster is not None
    return simulate_step(replicas, cluster, layers=LAYERS).total
