"""Dispatch of a global batch's documents to replicas: whole rows in turn, balanced by modelled time, or to pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from mindspeed_cp.data.balance import Assignment, assign
from mindspeed_cp.data.corpus import DIGEST_BITS
from mindspeed_cp.data.pool import UNEVEN, PoolModel, assign_to_pools
from mindspeed_cp.data.trajectories import TrajectoryCorpus
from mindspeed_cp.layout import Documents


@dataclass(frozen=True, eq=False)
class DispatchedBatch:
    """A global batch assigned to replicas.

    Attributes:
        chunks: chunks of all documents, DOC_CHUNK [chunks], in the order of the packed rows.
        micro_batches: micro-batches of each replica, each the ascending indices of its chunks, int64.
        seconds: modelled time of each replica, float64 [replicas].
        dispatch_seconds: wall time of the dispatch.
        pools: number of pools of equally many consecutive replicas, whose ranks compute every micro-batch of the pool
            together; the replicas of a pool have the same ones. 0: each replica has its own.
    """

    chunks: np.ndarray
    micro_batches: Sequence[Sequence[np.ndarray]]
    seconds: np.ndarray
    dispatch_seconds: float
    pools: int = 0

    @property
    def pooled(self) -> bool:
        """True if replicas compute micro-batches together."""
        return self.pools > 0

    @property
    def imbalance(self) -> float:
        """Modelled time of the slowest replica divided by the mean; 1.0 if all times are 0."""
        return float(self.seconds.max() / self.seconds.mean()) if self.seconds.any() else 1.0

    @property
    def digest(self) -> int:
        """Hash of the documents, their assignment and the number of pools, an integer of 52 bits."""
        digest = blake2b(digest_size=8, person=b"pool %d" % self.pools if self.pooled else b"")
        for replica in self.micro_batches:
            digest.update(len(replica).to_bytes(8, "little"))
            for numbers in replica:
                digest.update(len(numbers).to_bytes(8, "little"))
                for name in ("document", "start", "length"):
                    digest.update(self.chunks[name][numbers].astype("<i8").tobytes())
        return int.from_bytes(digest.digest(), "little") >> (64 - DIGEST_BITS)


@dataclass(frozen=True)
class Dispatcher:
    """Dispatches global batches by lengths alone, so every rank gets the same result.

    Attributes:
        balance: "none": row i is a micro-batch of replica i % replicas; "time": `balance.assign` decides; "pool": as
            "time", or pools of the ranks of several replicas where `pool` finds that faster.
        replicas: number of data-parallel replicas.
        context: largest number of tokens in a micro-batch.
        cost: modelled seconds of documents, from lengths int64 [documents], or with `trees` from Documents, to float64
            [documents].
        per_micro_batch: modelled seconds that a micro-batch takes in addition to its documents.
        equal_counts: all replicas have the same number of micro-batches.
        keeps_document_numbers: documents keep their index in the global batch, on which attention dropout depends; in a
            micro-batch, documents of other micro-batches then have length 0.
        pool: compares replicas with pools; None, or with one replica: there is no pool.
        equal_pool_counts: as `equal_counts`, of several pools.
        stages: number of pipeline stages, for which micro-batches are packed and ordered unless `balance` is "none".
        trees: the corpus, if its documents are groups of trajectories: each costs what its trees cost. None: documents
            are what their lengths say.
    """

    balance: str
    replicas: int
    context: int
    cost: Callable[[Any], np.ndarray]
    per_micro_batch: float = 0.0
    equal_counts: bool = False
    keeps_document_numbers: bool = False
    pool: PoolModel | None = None
    stages: int = 1
    trees: TrajectoryCorpus | None = None
    equal_pool_counts: bool = False

    def __call__(self, rows: Sequence[np.ndarray]) -> DispatchedBatch:
        """Dispatch the rows of one global batch, each DOC_CHUNK [chunks]; the number of rows is a multiple of
        `replicas`."""
        began = time.perf_counter()
        chunks = np.concatenate(rows)
        row_of_chunk = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        costs = self._seconds(chunks)
        if self.balance == "none":
            times = np.bincount(row_of_chunk, costs, len(rows)) + self.per_micro_batch
            numbers = np.split(np.arange(len(chunks)), np.flatnonzero(np.diff(row_of_chunk)) + 1)
            seconds = times.reshape(-1, self.replicas).sum(0)
            micro_batches = [numbers[replica :: self.replicas] for replica in range(self.replicas)]
            return DispatchedBatch(chunks, micro_batches, seconds, time.perf_counter() - began)
        assignment = assign(
            chunks["length"],
            costs,
            self.replicas,
            token_bound=self.context,
            per_micro_batch=self.per_micro_batch,
            rows=row_of_chunk,
            equal_counts=self.equal_counts,
            stages=self.stages,
        )
        micro_batches = [assignment.rows(replica) for replica in range(self.replicas)]
        batch = DispatchedBatch(chunks, micro_batches, assignment.seconds, 0.0)
        if self.balance == "pool" and self.pool is not None and self.replicas > 1:
            batch = self._fastest(batch, self.pool, costs, row_of_chunk)
        return replace(batch, dispatch_seconds=time.perf_counter() - began)

    def _seconds(self, chunks: np.ndarray) -> np.ndarray:
        """Return the modelled seconds of each chunk, float64 [chunks]."""
        if self.trees is None:
            return self.cost(chunks["length"])
        groups = chunks["document"]
        return self.trees.sum_of_groups(groups, self.cost(self.trees.documents(groups)))

    def _documents(self, chunks: np.ndarray, numbers: np.ndarray) -> Documents:
        """Return the documents of some chunks."""
        if self.trees is None:
            return Documents(chunks["length"][numbers])
        return self.trees.documents(chunks["document"][numbers])

    def _fastest(
        self, batch: DispatchedBatch, model: PoolModel, costs: np.ndarray, row_of_chunk: np.ndarray
    ) -> DispatchedBatch:
        """Return the batch on replicas, as it is given, or on one pool or several, as is modelled to be fastest."""
        whole = divided = None
        may_be_slowest: list[list[np.ndarray]] = []
        if model.subpools > 1:
            divided = self._pooled(batch.chunks, costs, row_of_chunk, model.subpools)
            # The pool with most work, and that with the document of most work.
            pools = {int(np.argmax(divided.seconds)), int(divided.replica[np.argmax(costs)])}
            may_be_slowest = [divided.rows(pool) for pool in sorted(pools)]
        if divided is None or divided.imbalance > UNEVEN:
            whole = self._pooled(batch.chunks, costs, row_of_chunk, 1)
        order = np.argsort(-batch.seconds, kind="stable")
        choice = model.choose(
            partial(self._documents, batch.chunks),
            [batch.micro_batches[replica] for replica in order],
            None if whole is None else whole.rows(0),
            may_be_slowest,
        )
        if not choice.pools:
            seconds = np.empty(self.replicas)
            seconds[order] = choice.seconds
            return replace(batch, seconds=seconds)
        pooled = whole if choice.pools == 1 else divided
        assert pooled is not None
        micro_batches = [pooled.rows(pool) for pool in range(len(pooled.seconds))]
        pool_of_replica = np.arange(self.replicas) * len(micro_batches) // self.replicas
        shares = pooled.seconds / pooled.slowest if pooled.slowest else np.ones(len(micro_batches))
        return replace(
            batch,
            micro_batches=[micro_batches[pool] for pool in pool_of_replica],
            seconds=(choice.seconds.max() * shares)[pool_of_replica],
            pools=len(micro_batches),
        )

    def _pooled(self, chunks: np.ndarray, costs: np.ndarray, row_of_chunk: np.ndarray, pools: int) -> Assignment:
        """Return the pool of each chunk."""
        return assign_to_pools(
            chunks["length"],
            costs,
            pools,
            self.replicas,
            context=self.context,
            per_micro_batch=self.per_micro_batch,
            rows=row_of_chunk,
            equal_counts=self.equal_pool_counts and pools > 1,
            stages=self.stages,
        )
