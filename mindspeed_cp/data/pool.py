"""Pools of data-parallel and context-parallel ranks for the documents of a step, or replicas with rows of their own:
which of them ends earliest.

Gradients are summed over the same ranks either way, and the loss is a sum over tokens divided by their number over all
ranks, so a step may do either::

    replicas   [ row 0 ][ row 1 ]     each over its own ranks; the step lasts as long as the slowest one
    pool       [ rows 0 and 1   ]     every document on as many of all ranks as it needs
    subpools   [ 0, 1 ][ 2, 3   ]     of very many ranks: equal pools of whole replicas, each with documents of its own

A document as long as the context keeps one replica busy longer than the others, and a pool shares it among all ranks. A
pool has more messages between nodes, and a larger placement to search, so replicas win where they are even already. Of
several pools a rank plans its own alone; :mod:`mindspeed_cp.data.pool` says which documents each gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.data.balance import LINEAR_KERNELS, Assignment, assign
from mindspeed_cp.data.candidates import BACKWARD, pipeline_time
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS

#: The algorithm whose plans have groups of any size, so that a pool is one plan.
POOL_ALGORITHM = "hierarchical"

#: The pool is taken if its time is less than this much of the replicas'. Times that are equal but for rounding, which
#: may differ between machines, then give replicas on all of them.
CLEARLY_LESS = 1 - 1e-9

#: Times of the placement model within this factor of each other are simulated.
SIMULATED_WITHIN = 1.1

#: Options of a hierarchical plan on which the placement model depends.
PLACEMENT_OPTIONS = tuple(inspect.signature(choose_placement).parameters)[4:]

MicroBatches = Sequence[np.ndarray]  # of a replica or of the pool: the documents of each, int64
DocumentsOf = Callable[[np.ndarray], Documents]  # some documents of a step by their numbers, int64 [n]


@dataclass(frozen=True)
class PoolChoice:
    """The fastest way of a step.

    Attributes:
        pools: number of pools; 0: replicas.
        seconds: modelled time of each replica, float64 [replicas]; of pools, the same for all.
    """

    pools: int
    seconds: np.ndarray


@dataclass(frozen=True)
class PoolModel:
    """Models the time of a step on replicas, on the pool of all their ranks, and on several pools.

    The placement model of the planner estimates micro-batches: of pools first, then of replicas until one of them is
    surely slower. If the two times are within `SIMULATED_WITHIN` of each other, or attention has a window, which that
    model leaves out, pools and replicas are simulated.

    Attributes:
        replica: context-parallel ranks of a replica.
        pool: those of all replicas, numbered replica by replica.
        subpool: those of each of several equal pools; None: there is one pool.
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
    subpool: Topology | None = None

    @property
    def subpools(self) -> int:
        """Number of equal pools of a step that is on several; 1: there is one pool."""
        return 1 if self.subpool is None else self.pool.ranks // self.subpool.ranks

    def choose(
        self,
        documents: np.ndarray | DocumentsOf,
        replicas: Sequence[MicroBatches],
        pooled: MicroBatches | None,
        subpools: Sequence[MicroBatches] = (),
    ) -> PoolChoice:
        """Return the fastest way.

        Args:
            documents: tokens of the documents of a step, int64 [documents]; or a function that gives some of them by
                their numbers, int64 [n].
            replicas: micro-batches of each replica; those that may be the slowest are best given first.
            pooled: micro-batches of the pool of all ranks; None: it is not compared.
            subpools: micro-batches of those of several pools that may be the slowest; empty: there is one pool.

        Raises:
            ConfigError: neither replicas nor pools can be planned, for example under a bound of tokens.
        """
        given = documents if callable(documents) else lambda numbers: Documents(documents[numbers])
        pools, groups, topology, of_pools = self._faster_pools(given, pooled, subpools)
        of_replicas = np.zeros(len(replicas))
        for number, group in enumerate(replicas):
            of_replicas[number] = self._estimate_or_never(given, group, self.replica)
            if of_replicas[number] > SIMULATED_WITHIN * of_pools:  # whatever the others take
                return PoolChoice(pools, np.full(len(replicas), of_pools))
        static = float(of_replicas.max())
        if min(static, of_pools) == np.inf:
            self._estimate(given, replicas[int(of_replicas.argmax())], self.replica)  # raises the error again
        is_pooled = of_pools < CLEARLY_LESS * static
        if self.attention.window is None and max(static, of_pools) <= SIMULATED_WITHIN * min(static, of_pools):
            of_pools = max(self._simulate(given, group, topology) for group in groups)
            slowest_first = np.argsort(-of_replicas, kind="stable").tolist()
            least = of_pools / CLEARLY_LESS
            is_pooled = any(self._simulate(given, replicas[number], self.replica) > least for number in slowest_first)
        return PoolChoice(pools, np.full(len(replicas), of_pools)) if is_pooled else PoolChoice(0, of_replicas)

    def _faster_pools(
        self, given: DocumentsOf, pooled: MicroBatches | None, subpools: Sequence[MicroBatches]
    ) -> tuple[int, Sequence[MicroBatches], Topology, float]:
        """Return the number of pools that is faster by estimate, the micro-batches of these pools, the ranks of each,
        and the estimate, in seconds."""
        ways: list[tuple[int, Sequence[MicroBatches], Topology]] = []
        if subpools:
            assert self.subpool is not None
            ways.append((self.subpools, subpools, self.subpool))
        if pooled is not None:
            ways.append((1, [pooled], self.pool))
        estimates = [
            max(self._estimate_or_never(given, group, topology) for group in groups) for _, groups, topology in ways
        ]
        best = len(ways) - 1 if estimates[-1] < CLEARLY_LESS * estimates[0] else 0
        return *ways[best], estimates[best]

    @cached_property
    def _placement_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in PLACEMENT_OPTIONS}

    def _estimate_or_never(self, given: DocumentsOf, micro_batches: MicroBatches, topology: Topology) -> float:
        """Return the same as `_estimate`; infinity if some micro-batch cannot be planned."""
        try:
            return self._estimate(given, micro_batches, topology)
        except ConfigError:
            return float("inf")

    def _estimate(self, given: DocumentsOf, micro_batches: MicroBatches, topology: Topology) -> float:
        """Return the seconds of micro-batches, one after the other: of the placement model, or simulated."""
        if self.attention.window is not None:
            return self._simulate(given, micro_batches, topology)
        seconds = []
        for numbers in micro_batches:
            documents = given(numbers)
            result = choose_placement(documents, documents, topology, self.attention, **self._placement_options)
            seconds.append(result.score.total)
        return self._scheduled(seconds)

    def _simulate(self, given: DocumentsOf, micro_batches: MicroBatches, topology: Topology) -> float:
        """Return the seconds of the plans of micro-batches by event simulation."""
        cluster, seconds = cluster_of(topology), []
        for numbers in micro_batches:
            plan = build_plan(given(numbers), topology, self.attention, POOL_ALGORITHM, **dict(self.options))
            seconds.append(simulate_plan(plan, cluster, self.layer, COARSE_SPANS).total)
        return self._scheduled(seconds)

    def _scheduled(self, layer_seconds: list[float]) -> float:
        """Return when a step of micro-batches ends, from the seconds of a layer in each: one after the other, with
        stages by the 1F1B schedule."""
        launches = self.layers * LINEAR_KERNELS * cluster_of(self.replica).launch  # besides attention
        seconds = [self.layers * layer + launches for layer in layer_seconds]
        return pipeline_time(seconds, self.stages) / (self.stages * (1 + BACKWARD))


# Assignment of the documents of a step to pools of whole replicas, each of which is planned by itself.
#
# To the assignment a pool is what a replica is to :mod:`mindspeed_cp.data.balance`: documents go to pools by their
# modelled work, the longest first, each to the pool with the least work, and those of a pool into micro-batches that
# have room for as many tokens as its replicas have together::
#
#     ranks           0  1  2  3  4  5  6  7        8 replicas of one rank
#     one pool      [ 0  1  2  3  4  5  6  7 ]      planned as a whole, by everyone
#     two pools     [ 0  1  2  3 ][ 4  5  6  7 ]    equal in work; a rank plans its own pool alone


#: A step on several pools is also compared with one pool of all ranks if the busiest of them has more than this many
#: times the mean work: a document of more than a pool's share then keeps one pool busier than the others. Below, one
#: pool has nothing to level: several pools are also planned more thoroughly (docs/algorithms.md).
UNEVEN = 1.1


def assign_to_pools(
    lengths: np.ndarray,
    work: np.ndarray,
    pools: int,
    replicas: int,
    *,
    context: int,
    rows: np.ndarray | None = None,
    **more: Any,
) -> Assignment:
    """Assign the documents of a step to equal pools, in the place of replicas, and to their micro-batches.

    A pool has as few micro-batches as there can be (with pipeline stages, as many as end soonest), equal in modelled
    time, each with as many tokens as its replicas have room for together.

    Args:
        lengths: tokens of each document, int64 [documents].
        work: modelled seconds of each on the ranks of one replica, float64 [documents].
        pools: number of pools, a divisor of `replicas`; 1: all documents are of one pool.
        replicas: number of data-parallel replicas.
        context: maximum number of tokens in a micro-batch of one replica.
        rows: row of each document as it was packed, int64 [documents]; row i is of replica i % replicas.
        more: arguments of :func:`mindspeed_cp.data.balance.assign`.

    Raises:
        ConfigError: a document is longer than such a micro-batch, or there are too few documents for equal counts.
    """
    of_pool = replicas // pools
    rows = None if rows is None else rows // of_pool
    return assign(lengths, work / of_pool, pools, token_bound=context * of_pool, rows=rows, **more)
