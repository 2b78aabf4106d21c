"""One pool of all data-parallel and context-parallel ranks for the documents of a step, or replicas with rows of their
own: which of both ends earlier.

Gradients are summed over the same ranks either way, and the loss is a sum over tokens divided by their number over all
ranks, so a step may do either::

    replicas   [ row 0 ][ row 1 ]     each over its own ranks; the step lasts as long as the slowest one
    pool       [ rows 0 and 1   ]     every document on as many of all ranks as it needs

A document as long as the context keeps one replica busy longer than the others, and a pool shares it among all ranks. A
pool has more messages between nodes, and a larger placement to search, so replicas win where they are even already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.choose.batch_chooser import PLACEMENT_OPTIONS, SIMULATED_WITHIN
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.data.document_cost import LINEAR_KERNELS
from mindspeed_cp.data.pipeline import BACKWARD, pipeline_time
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS

#: The algorithm whose plans have groups of any size, so that a pool is one plan.
POOL_ALGORITHM = "hierarchical"

#: The pool is taken if its time is less than this much of the replicas'. Times that are equal but for rounding, which
#: may differ between machines, then give replicas on all of them.
CLEARLY_LESS = 1 - 1e-9

MicroBatches = Sequence[np.ndarray]  # of a replica or of the pool: the documents of each, int64
DocumentsOf = Callable[[np.ndarray], Documents]  # some documents of a step by their numbers, int64 [n]


@dataclass(frozen=True)
class PoolChoice:
    """The faster of both for a step.

    Attributes:
        pooled: True for the pool.
        seconds: modelled time of each replica, float64 [replicas]; of the pool, the same for all.
    """

    pooled: bool
    seconds: np.ndarray


@dataclass(frozen=True)
class PoolModel:
    """Models the time of a step on replicas and on the pool of all their ranks.

    The placement model of the planner estimates all micro-batches. If the two times are within `SIMULATED_WITHIN` of
    each other, or attention has a window, which that model leaves out, the pool and the replicas are simulated.

    Attributes:
        replica: context-parallel ranks of a replica.
        pool: those of all replicas, numbered replica by replica.
        attention: attention of a layer on one tensor-parallel rank.
        layer: its linear part.
        layers: number of layers.
        options: options of the plans (`build_plan`).
        stages: number of pipeline stages, which share the layers.
    """

    replica: Topology
    pool: Topology
    attention: AttentionConfig
    layer: LayerCost
    layers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    stages: int = 1

    def choose(
        self, documents: np.ndarray | DocumentsOf, replicas: Sequence[MicroBatches], pooled: MicroBatches
    ) -> PoolChoice:
        """Return the faster of both.

        Args:
            documents: tokens of the documents of a step, int64 [documents]; or a function that gives some of them by
                their numbers, int64 [n].
            replicas: micro-batches of each replica.
            pooled: micro-batches of the pool.

        Raises:
            ConfigError: some micro-batch cannot be planned, for example under a bound of tokens.
        """
        given = documents if callable(documents) else partial(documents_of_lengths, documents)
        of_replicas = np.array([self._estimate(given, group, self.replica) for group in replicas])
        # Last, so that its placements are in the planner's cache when they are built.
        of_pool = self._estimate(given, pooled, self.pool)
        static = float(of_replicas.max())
        is_pooled = of_pool < CLEARLY_LESS * static
        if not self._has_window and max(static, of_pool) <= SIMULATED_WITHIN * min(static, of_pool):
            of_pool = self._simulate(given, pooled, self.pool)
            is_pooled = self._is_any_slower(of_pool, given, replicas, of_replicas)
        return PoolChoice(is_pooled, np.full(len(replicas), of_pool) if is_pooled else of_replicas)

    def _is_any_slower(
        self, seconds: float, given: DocumentsOf, replicas: Sequence[MicroBatches], estimates: np.ndarray
    ) -> bool:
        """Return True if a replica is slower by simulation than `seconds`; the slowest by estimate come first."""
        order = np.argsort(-estimates, kind="stable").tolist()
        least = seconds / CLEARLY_LESS
        return any(self._simulate(given, replicas[replica], self.replica) > least for replica in order)

    @property
    def _has_window(self) -> bool:
        return self.attention.window is not None

    @cached_property
    def _placement_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in PLACEMENT_OPTIONS}

    @property
    def _per_micro_batch(self) -> float:
        """Seconds of a micro-batch's kernel launches besides attention."""
        return self.layers * LINEAR_KERNELS * cluster_of(self.replica).launch

    def _estimate(self, given: DocumentsOf, micro_batches: MicroBatches, topology: Topology) -> float:
        """Return the seconds of micro-batches, one after the other: of the placement model, or simulated."""
        if self._has_window:
            return self._simulate(given, micro_batches, topology)
        seconds = []
        for numbers in micro_batches:
            documents = given(numbers)
            result = choose_placement(documents, documents, topology, self.attention, **self._placement_options)
            seconds.append(self.layers * result.score.total + self._per_micro_batch)
        return self._scheduled(seconds)

    def _simulate(self, given: DocumentsOf, micro_batches: MicroBatches, topology: Topology) -> float:
        """Return the seconds of the plans of micro-batches by event simulation."""
        cluster, seconds = cluster_of(topology), []
        for numbers in micro_batches:
            plan = build_plan(given(numbers), topology, self.attention, POOL_ALGORITHM, **dict(self.options))
            timeline = simulate_plan(plan, cluster, self.layer, COARSE_SPANS)
            seconds.append(self.layers * timeline.total + self._per_micro_batch)
        return self._scheduled(seconds)

    def _scheduled(self, seconds: list[float]) -> float:
        """Return when a step of these micro-batches ends: one after the other, with stages by the 1F1B schedule."""
        return pipeline_time(seconds, self.stages) / (self.stages * (1 + BACKWARD))


def documents_of_lengths(lengths: np.ndarray, numbers: np.ndarray) -> Documents:
    """Return some documents of a step by the lengths of all, int64 [documents]."""
    return Documents(lengths[numbers])
