"""Packed rows -> planned micro-batches of this rank, made ahead of time in a thread.

Packing, dispatch, planning and slicing need NumPy and nothing that the model computes, so they run while the model
computes, a few micro-batches ahead. All ranks of a replica make the same rows and the same plans independently, and
nothing is sent.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.algorithms.plan_cache import PlanCache
from mindspeed_cp.config.derived import document_cost, mean_layer_cost, training_plan_options
from mindspeed_cp.data.dispatch import DispatchedBatch, Dispatcher, PoolModel
from mindspeed_cp.data.stream import PackedRow, PackedStream
from mindspeed_cp.engine import prepare
from mindspeed_cp.engine.hidden_states import hidden_redistribution
from mindspeed_cp.megatron import PlannedBatchParams, micro_batch_seed, planned_batch
from mindspeed_cp.ops.attention.backends import backend_from_settings
from mindspeed_cp.plan import AttentionConfig, Plan, verify_plan
from mindspeed_cp.train.model import TrainingModel

AHEAD = 3  # micro-batches beside the one that is computed; one of them is being made


@dataclass(frozen=True)
class MicroBatch:
    """One packed row, this rank's share of it, and what its step adds up.

    Attributes:
        batch: tokens, labels, loss_mask and position_ids, each [1, t].
        params: carries the row's plan to every layer.
        visible_pairs: visible (query, key) pairs of this rank's heads, over all layers.
        planning_seconds: time in which this rank packed and dispatched the global batch (counted in its first row), and
            planned the row.
        count: number of this replica's micro-batches in the global batch.
        dispatched, state: assignment of the global batch, and state of the data stream behind it.
    """

    batch: dict[str, Tensor]
    params: PlannedBatchParams
    visible_pairs: int
    planning_seconds: float
    count: int
    dispatched: DispatchedBatch
    state: dict[str, Any]


class MicroBatchLoader:
    """An endless iterator over micro-batches, and a context manager that ends its thread.

    Args:
        training: the model, its settings and this rank.
        stream: rows of this replica, at the position where training goes on.
        dispatcher: assigns the documents of each global batch to the replicas.
    """

    def __init__(self, training: TrainingModel, stream: PackedStream, dispatcher: Dispatcher) -> None:
        self._stream, self._dispatcher = stream, dispatcher
        self._world, settings = training.world, training.world.settings
        self._layers = Counter(training.attentions)  # number of layers with each attention
        self._suite, self._seed = settings.context_parallel_suite, settings.train.seed
        self._options = training_plan_options(settings)
        train = settings.train
        self._dtype = torch.bfloat16 if train.bf16 else torch.float32
        self._rows_multiple = train.tensor_model_parallel_size if train.sequence_parallel else 1
        self._rows = train.global_batch_size
        self._plans = PlanCache(self._prepare)
        self._verifies = False  # this rank proves the plans of the row that is being made
        self._batch: tuple[list[PackedRow], DispatchedBatch]  # the one whose micro-batches are being made
        self._began = 0.0  # when the work for the next micro-batch began
        self._micro_batches = self._generate()
        self._executor = ThreadPoolExecutor(1, "mindspeed-cp-batches")
        self._pending: deque[Future[MicroBatch]] = deque()

    def __enter__(self) -> MicroBatchLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch. An error of the thread is raised here."""
        while len(self._pending) <= AHEAD:
            self._pending.append(self._executor.submit(self._micro_batches.__next__))
        return self._pending.popleft().result()

    def _generate(self) -> Iterator[MicroBatch]:
        while True:
            self._began = time.perf_counter()
            self._batch = self._stream.next_batch(self._rows, self._dispatcher)
            for row in self._batch[0]:
                yield self._make(row)
                self._began = time.perf_counter()

    def _prepare(self, plan: Plan) -> None:
        """Prove a new plan, where it is this rank's turn, and prepare the engine for it."""
        if self._verifies:
            verify_plan(plan)
        device = self._world.device
        _, rank = self._world.plan_ranks(self._batch[1].pooled)
        backend = backend_from_settings(self._suite, device.type, plan.attention, self._dtype)
        prepare(plan, rank, self._dtype, backend, device)
        if plan.linear_layout is not None:
            # Hidden states move: under sequence parallelism, this rank's share of the rows.
            shares = self._rows_multiple
            hidden_redistribution(plan, rank * shares + self._world.rank % shares, device, shares, shares)

    def _planned(self, row: PackedRow) -> Mapping[AttentionConfig, Plan]:
        """Return the plans of a row by the attention of layers, from the cache if they are there."""
        topology, rank = self._world.plan_ranks(self._batch[1].pooled)
        # Every rank has the same plans: the ranks of a plan take turns to prove them.
        turn = row.index // self._world.replicas % topology.ranks
        self._verifies = self._suite.verify_plans and turn == rank
        return {
            attention: self._plans.get(row.documents, topology, attention, self._suite.algorithm, self._options)
            for attention in self._layers
        }

    def _make(self, row: PackedRow) -> MicroBatch:
        world, (rows, dispatched) = self._world, self._batch
        _, rank = world.plan_ranks(dispatched.pooled)
        plans = self._planned(row)
        planning_seconds = time.perf_counter() - self._began
        batch, params = planned_batch(
            {"tokens": row.tokens, "labels": row.labels, "loss_mask": row.loss_mask},
            list(plans.values()),
            rank,
            rows_multiple=self._rows_multiple,
            dropout_seed=micro_batch_seed(self._seed, row.dropout_stream_id),
            pooled=dispatched.pooled,
        )
        return MicroBatch(
            batch={name: x.to(world.device) for name, x in batch.items()},
            params=params,
            visible_pairs=sum(
                layers * int(plans[attention].work_of(rank).sum()) for attention, layers in self._layers.items()
            ),
            planning_seconds=planning_seconds,
            count=len(rows),
            dispatched=dispatched,
            state=self._stream.state_dict(),
        )


def make_dispatcher(training: TrainingModel) -> Dispatcher:
    """Return the dispatcher of `data.balance`."""
    world, settings = training.world, training.world.settings
    cost, pool = document_cost(settings, training.attentions), None
    if world.pool is not None:
        pool = PoolModel(
            replica=settings.context_parallel_suite.topology,
            pool=world.pool,
            attention=training.attentions[0],  # layers of different attention cannot share a placement, and are refused
            layer=mean_layer_cost(settings),
            layers=len(training.attentions),
            options=training_plan_options(settings),
        )
    # Megatron lays expert-parallel groups over consecutive ranks, and a replica is consecutive ranks. Where experts
    # span replicas, these wait for each other in every layer and need equally many micro-batches.
    has_experts, expert_ranks = settings.model.num_moe_experts is not None, settings.train.expert_model_parallel_size
    return Dispatcher(
        balance=settings.data.balance,
        replicas=world.replicas,
        context=settings.data.seq_length,
        cost=cost,
        per_micro_batch=cost.per_micro_batch,
        equal_counts=has_experts and world.cp_size * world.tp_size % expert_ranks != 0,
        keeps_document_numbers=settings.model.attention_dropout > 0,
        pool=pool,
    )
