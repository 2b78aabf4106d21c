"""Dispatch of a global batch's documents: whole rows in turn, balanced by modelled time, or to one pool of all data-
and context-parallel ranks where that ends earlier.

Gradients are summed over the same ranks either way, and the loss is a sum over tokens divided by their number over all
ranks, so a step may do either::

    replicas   [ row 0 ][ row 1 ]     each over its own ranks; the step lasts as long as the slowest one
    pool       [ rows 0 and 1   ]     every document on as many of all ranks as it needs

A document as long as the context keeps one replica busy longer than the others, and a pool shares it among all ranks. A
pool has more messages between nodes, and a larger placement to search, so replicas win where they are even already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.data.balance import LINEAR_KERNELS, assign
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


@dataclass(frozen=True)
class PoolChoice:
    """The faster way of a step.

    Attributes:
        pooled: True: one pool of all ranks; False: replicas.
        seconds: modelled time of each replica, float64 [replicas]; of the pool, the same for all.
    """

    pooled: bool
    seconds: np.ndarray


@dataclass(frozen=True)
class PoolModel:
    """Models the time of a step on replicas, and on the pool of all their ranks.

    The placement model of the planner estimates micro-batches: of the pool first, then of replicas until one of them is
    surely slower. If the two times are within `SIMULATED_WITHIN` of each other, or attention has a window, which that
    model leaves out, pool and replicas are simulated.

    Attributes:
        replica: context-parallel ranks of a replica.
        pool: those of all replicas, numbered replica by replica.
        attention: attention of a layer on one tensor-parallel rank.
        layer: its linear part.
        layers: number of layers.
        options: options of the plans (`build_plan`).
    """

    replica: Topology
    pool: Topology
    attention: AttentionConfig
    layer: LayerCost
    layers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def choose(self, lengths: np.ndarray, replicas: Sequence[MicroBatches], pooled: MicroBatches) -> PoolChoice:
        """Return the faster way.

        Args:
            lengths: tokens of the documents of a step, int64 [documents].
            replicas: micro-batches of each replica; those that may be the slowest are best given first.
            pooled: micro-batches of the pool.

        Raises:
            ConfigError: neither replicas nor the pool can be planned, for example under a bound of tokens.
        """
        of_pool = self._estimate_or_never(lengths, pooled, self.pool)
        of_replicas = np.zeros(len(replicas))
        for number, group in enumerate(replicas):
            of_replicas[number] = self._estimate_or_never(lengths, group, self.replica)
            if of_replicas[number] > SIMULATED_WITHIN * of_pool:  # whatever the others take
                return PoolChoice(True, np.full(len(replicas), of_pool))
        static = float(of_replicas.max())
        if min(static, of_pool) == np.inf:
            self._estimate(lengths, replicas[int(of_replicas.argmax())], self.replica)  # raises the error again
        is_pooled = of_pool < CLEARLY_LESS * static
        if self.attention.window is None and max(static, of_pool) <= SIMULATED_WITHIN * min(static, of_pool):
            of_pool = self._simulate(lengths, pooled, self.pool)
            slowest_first = np.argsort(-of_replicas, kind="stable").tolist()
            least = of_pool / CLEARLY_LESS
            is_pooled = any(self._simulate(lengths, replicas[number], self.replica) > least for number in slowest_first)
        return PoolChoice(True, np.full(len(replicas), of_pool)) if is_pooled else PoolChoice(False, of_replicas)

    def _estimate_or_never(self, lengths: np.ndarray, micro_batches: MicroBatches, topology: Topology) -> float:
        """Return the same as `_estimate`; infinity if some micro-batch cannot be planned."""
        try:
            return self._estimate(lengths, micro_batches, topology)
        except ConfigError:
            return float("inf")

    def _estimate(self, lengths: np.ndarray, micro_batches: MicroBatches, topology: Topology) -> float:
        """Return the seconds of micro-batches, one after the other: of the placement model, or simulated."""
        if self.attention.window is not None:
            return self._simulate(lengths, micro_batches, topology)
        options = {name: value for name, value in self.options.items() if name in PLACEMENT_OPTIONS}
        seconds = []
        for numbers in micro_batches:
            documents = Documents(lengths[numbers])
            seconds.append(choose_placement(documents, documents, topology, self.attention, **options).score.total)
        return self._step_seconds(seconds)

    def _simulate(self, lengths: np.ndarray, micro_batches: MicroBatches, topology: Topology) -> float:
        """Return the seconds of the plans of micro-batches by event simulation."""
        cluster, seconds = cluster_of(topology), []
        for numbers in micro_batches:
            documents = Documents(lengths[numbers])
            plan = build_plan(documents, topology, self.attention, POOL_ALGORITHM, **dict(self.options))
            seconds.append(simulate_plan(plan, cluster, self.layer, COARSE_SPANS).total)
        return self._step_seconds(seconds)

    def _step_seconds(self, layer_seconds: list[float]) -> float:
        """Return the seconds of a step from those of a layer in each micro-batch."""
        launches = self.layers * LINEAR_KERNELS * cluster_of(self.replica).launch  # besides attention
        return sum(self.layers * layer + launches for layer in layer_seconds)


@dataclass(frozen=True, eq=False)
class DispatchedBatch:
    """A global batch assigned to replicas.

    Attributes:
        chunks: chunks of all documents, DOC_CHUNK [chunks], in the order of the packed rows.
        micro_batches: micro-batches of each replica, each the ascending indices of its chunks, int64.
        seconds: modelled time of each replica, float64 [replicas].
        pooled: True if the ranks of all replicas compute every micro-batch together, and replicas have the same ones.
    """

    chunks: np.ndarray
    micro_batches: Sequence[Sequence[np.ndarray]]
    seconds: np.ndarray
    pooled: bool = False

    @property
    def imbalance(self) -> float:
        """Modelled time of the slowest replica divided by the mean; 1.0 if all times are 0."""
        return float(self.seconds.max() / self.seconds.mean()) if self.seconds.any() else 1.0

    @property
    def digest(self) -> int:
        """Hash of the documents, their assignment and whether they are pooled, an integer of 52 bits: ranks compare it
        as float64, which holds it exactly."""
        digest = blake2b(digest_size=8, person=b"pool" if self.pooled else b"")
        for replica in self.micro_batches:
            digest.update(len(replica).to_bytes(8, "little"))
            for numbers in replica:
                digest.update(len(numbers).to_bytes(8, "little"))
                for name in ("document", "start", "length"):
                    digest.update(self.chunks[name][numbers].astype("<i8").tobytes())
        return int.from_bytes(digest.digest(), "little") >> 12


@dataclass(frozen=True)
class Dispatcher:
    """Dispatches global batches by lengths alone, so every rank gets the same result.

    Attributes:
        balance: "none": row i is a micro-batch of replica i % replicas; "time": `balance.assign` decides; "pool": as
            "time", or one pool of the ranks of all replicas where `pool` finds that faster.
        replicas: number of data-parallel replicas.
        context: largest number of tokens in a micro-batch.
        cost: modelled seconds of documents, from lengths int64 [documents] to float64 [documents].
        per_micro_batch: modelled seconds that a micro-batch takes in addition to its documents.
        equal_counts: all replicas have the same number of micro-batches.
        keeps_document_numbers: documents keep their index in the global batch, on which attention dropout depends; in a
            micro-batch, documents of other micro-batches then have length 0.
        pool: compares replicas with the pool; None, or with one replica: there is no pool.
    """

    balance: str
    replicas: int
    context: int
    cost: Callable[[np.ndarray], np.ndarray]
    per_micro_batch: float = 0.0
    equal_counts: bool = False
    keeps_document_numbers: bool = False
    pool: PoolModel | None = None

    def __call__(self, rows: Sequence[np.ndarray]) -> DispatchedBatch:
        """Dispatch the rows of one global batch, each DOC_CHUNK [chunks]; the number of rows is a multiple of
        `replicas`."""
        chunks = np.concatenate(rows)
        row_of_chunk = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        costs = self.cost(chunks["length"])
        if self.balance == "none":
            times = np.bincount(row_of_chunk, costs, len(rows)) + self.per_micro_batch
            numbers = np.split(np.arange(len(chunks)), np.flatnonzero(np.diff(row_of_chunk)) + 1)
            seconds = times.reshape(-1, self.replicas).sum(0)
            micro_batches = [numbers[replica :: self.replicas] for replica in range(self.replicas)]
            return DispatchedBatch(chunks, micro_batches, seconds)
        assignment = assign(
            chunks["length"],
            costs,
            self.replicas,
            token_bound=self.context,
            per_micro_batch=self.per_micro_batch,
            rows=row_of_chunk,
            equal_counts=self.equal_counts,
        )
        batch = DispatchedBatch(chunks, assignment.micro_batches, assignment.seconds)
        if self.balance == "pool" and self.pool is not None and self.replicas > 1:
            return self._fastest(batch, self.pool, costs, row_of_chunk)
        return batch

    def _fastest(
        self, batch: DispatchedBatch, model: PoolModel, costs: np.ndarray, row_of_chunk: np.ndarray
    ) -> DispatchedBatch:
        """Return the batch on replicas, as it is given, or on the pool, as is modelled to be faster.

        The pool has as few micro-batches as there can be, equal in modelled time, each with as many tokens as the
        replicas have room for together; one replica's row is in the micro-batch of the same number.
        """
        lengths, replicas = batch.chunks["length"], self.replicas
        pooled = assign(
            lengths,
            costs / replicas,
            1,
            token_bound=self.context * replicas,
            per_micro_batch=self.per_micro_batch,
            rows=row_of_chunk // replicas,
        ).micro_batches[0]
        order = np.argsort(-batch.seconds, kind="stable")
        choice = model.choose(lengths, [batch.micro_batches[replica] for replica in order], pooled)
        if choice.pooled:
            return replace(batch, micro_batches=[pooled] * replicas, seconds=choice.seconds, pooled=True)
        seconds = np.empty(replicas)
        seconds[order] = choice.seconds
        return replace(batch, seconds=seconds)
