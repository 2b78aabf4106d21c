"""Dispatch of a global batch's documents: whole rows in turn, balanced by modelled time, or to a pool of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from mindspeed_cp.data.balance import assign
from mindspeed_cp.data.pool import PoolModel


@dataclass(frozen=True, eq=False)
class DispatchedBatch:
    """A global batch assigned to replicas.

    Attributes:
        chunks: chunks of all documents, DOC_CHUNK [chunks], in the order of the packed rows.
        micro_batches: micro-batches of each replica, each the ascending indices of its chunks, int64.
        seconds: modelled time of each replica, float64 [replicas].
        dispatch_seconds: wall time of the dispatch.
        pooled: True if the ranks of all replicas compute every micro-batch together, and replicas have the same ones.
    """

    chunks: np.ndarray
    micro_batches: Sequence[Sequence[np.ndarray]]
    seconds: np.ndarray
    dispatch_seconds: float
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
        began = time.perf_counter()
        chunks = np.concatenate(rows)
        row_of_chunk = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        costs = self.cost(chunks["length"])
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
        )
        batch = DispatchedBatch(chunks, assignment.micro_batches, assignment.seconds, 0.0)
        if self.balance == "pool" and self.pool is not None and self.replicas > 1:
            batch = self._fastest(batch, self.pool, costs, row_of_chunk)
        return replace(batch, dispatch_seconds=time.perf_counter() - began)

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
