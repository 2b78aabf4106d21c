"""Packed rows -> planned micro-batches of this rank, made ahead of time in a thread.

Packing, dealing, planning and slicing need NumPy and nothing that the model computes, so they are done while the model
computes, train.prefetch micro-batches ahead.  All ranks of a replica make the same rows and the same plans by
themselves: nothing is sent.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.config import Settings
from mindspeed_cp.data import Dealer, PackedRow, PackedStream
from mindspeed_cp.engine import prepare
from mindspeed_cp.engine.remap import remap_of
from mindspeed_cp.megatron import PlannedBatchParams, micro_batch_seed, planned_batch
from mindspeed_cp.ops.attention import backend_of
from mindspeed_cp.plan import AttentionConfig, Plan, verify_plan
from mindspeed_cp.train.choosing import Chosen, RowChooser
from mindspeed_cp.train.plans import PlanCache
from mindspeed_cp.train.stop import Stopped, StopRequest
from mindspeed_cp.train.world import World

POLL_SECONDS = 0.5  # between two looks at whether waiting for a batch still makes sense
STOP_SECONDS = 5.0  # how long a rank that is asked to stop goes on waiting: the other ranks are in the same step
END_SECONDS = 5.0  # until the thread is left behind: reading its file may never end


@dataclass(frozen=True)
class MicroBatch:
    """One packed row, as this rank sees it.

    Attributes:
        batch: tokens, labels, loss_mask and position_ids, each [1, t].
        params: carries the row's plan to every layer.
        tokens, documents: of the whole row, over all ranks.
        work: visible (query, key) pairs of this rank's heads, over all layers.
        state: of the data stream behind the global batch of this row.
        planning: seconds that this rank needed to deal the global batch (in its first row), and to choose an algorithm
            for the row and plan it.
        plans, known: plans that the row needed, and how many of them had been made before.
        chosen: the algorithm of these plans.
        digest: of the whole global batch as it was dealt; equal on all ranks.
        imbalance: of that batch: modelled time of the slowest replica over the mean.
        count: micro-batches that this replica has of that batch.
    """

    batch: dict[str, Tensor]
    params: PlannedBatchParams
    tokens: int
    documents: int
    work: int
    state: dict[str, Any]
    planning: float
    plans: int
    known: int
    chosen: Chosen
    digest: int = 0
    imbalance: float = 1.0
    count: int = 1


class Batches:
    """An endless iterator over micro-batches; a context manager, which ends its thread.

    Args:
        stream: rows of this replica, standing where training goes on.
        dealer: deals each global batch to the replicas.
        settings: of the run.
        attentions: what each layer computes on this tensor-parallel rank.
        world: this rank's place.
        stop: ends the wait for a batch that does not come.
    """

    def __init__(
        self,
        stream: PackedStream,
        dealer: Dealer,
        settings: Settings,
        attentions: Sequence[AttentionConfig],
        world: World,
        stop: StopRequest,
    ) -> None:
        self._stream, self._dealer, self._world, self._asked = stream, dealer, world, stop
        self._layers = Counter(attentions)  # how many layers attend in each way
        self._suite, self._seed = settings.context_parallel_suite, settings.train.seed
        self._choose = RowChooser(settings)
        train = settings.train
        self._dtype = torch.bfloat16 if train.bf16 else torch.float32
        self._rows_multiple = train.tensor_model_parallel_size if train.sequence_parallel else 1
        self._rows = train.global_batch_size
        self._ready: queue.Queue[MicroBatch | BaseException] = queue.Queue(train.prefetch)
        self._plans = PlanCache(self._prepare)
        self._proves = False  # this rank proves the plans of the row that is being made
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mindspeed-cp-batches", daemon=True)

    def __enter__(self) -> Batches:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        deadline = time.monotonic() + END_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:  # it may be waiting for a place in the queue
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch.  What went wrong while it was made is raised here.

        Raises:
            Stopped: this rank was asked to stop, and no batch came for STOP_SECONDS.
        """
        asked_at: float | None = None
        while True:
            try:
                made = self._ready.get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                pass
            if not self._thread.is_alive() and self._ready.empty():
                raise RuntimeError("the thread that makes batches has ended without a word")
            if self._asked.reason is None:
                continue
            asked_at = asked_at or time.monotonic()
            if time.monotonic() - asked_at >= STOP_SECONDS:
                raise Stopped(
                    f"stopped by {self._asked.reason} while rank {self._world.rank} waited for data.corpus; steps "
                    "after the newest checkpoint were not kept, and the same command goes on from there"
                )
        if isinstance(made, BaseException):
            raise made
        return made

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._put_batch()
        except BaseException as error:  # handed to the thread that trains
            self._ready.put(error)

    def _put_batch(self) -> None:
        """This replica's micro-batches of the next global batch, one after the other."""
        batch = self._stream.next_batch(self._rows, self._dealer)
        digest, imbalance = batch.dealt.digest, batch.dealt.imbalance
        for number, row in enumerate(batch.rows):
            made = self._make(row)
            planning = made.planning + (0.0 if number else batch.dealt.took)
            count = len(batch.rows)
            self._ready.put(replace(made, digest=digest, imbalance=imbalance, count=count, planning=planning))
            if self._stop.is_set():
                return

    def _prepare(self, plan: Plan) -> None:
        """Once for every plan that is made, before it is used."""
        if self._proves:
            verify_plan(plan)
        device = self._world.device
        prepare(plan, self._world.cp_rank, self._dtype, backend_of(self._suite, device.type), device)
        if plan.linear is not None:  # moves of hidden states: under sequence parallelism, of this rank's share of rows
            shares = self._rows_multiple
            remap_of(plan, self._world.cp_rank * shares + self._world.rank % shares, device, shares, shares)

    def _make(self, row: PackedRow) -> MicroBatch:
        suite, rank = self._suite, self._world.cp_rank
        # Every rank has the same plans: the ranks of a context-parallel group take turns to prove them.
        self._proves = suite.verify_plans and row.index // self._world.replicas % self._world.cp == rank
        began, known = time.perf_counter(), self._plans.found
        chosen = self._choose(row.documents)
        plans = {
            attention: self._plans.get(row.documents, suite.topology, attention, chosen.algorithm, chosen.options)
            for attention in self._layers
        }
        planning = time.perf_counter() - began
        batch, params = planned_batch(
            {"tokens": row.tokens, "labels": row.labels, "loss_mask": row.loss_mask},
            list(plans.values()),
            rank,
            rows_multiple=self._rows_multiple,
            dropout_seed=micro_batch_seed(self._seed, row.drawn_as),
        )
        return MicroBatch(
            batch={name: x.to(self._world.device) for name, x in batch.items()},
            params=params,
            tokens=row.documents.tokens,
            documents=int(np.count_nonzero(row.documents.lengths)),
            work=sum(layers * _work(plans[attention], rank) for attention, layers in self._layers.items()),
            state=self._stream.state_dict(),
            planning=planning,
            plans=len(plans),
            known=self._plans.found - known,
            chosen=chosen,
        )


def _work(plan: Plan, rank: int) -> int:
    """Visible (query, key) pairs of a rank's heads in one layer."""
    return int(plan.work_of(rank).sum())
