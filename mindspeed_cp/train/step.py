"""One optimizer step: forward and backward of this replica's micro-batches, and the update after all ranks' sums."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_cp.engine.recorder import timed_span
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import loss_function, megatron_imports
from mindspeed_cp.megatron.adaptors.loss import REPORT_KEY
from mindspeed_cp.train.micro_batch_loader import MicroBatch
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.stop_request import StopRequest
from mindspeed_cp.train.world import World

with megatron_imports():
    from megatron.core.pipeline_parallel import get_forward_backward_func

#: Fields of MicroBatch that a step adds up.
_SUMMED_FIELDS = ("visible_pairs", "tokens", "documents", "planning_seconds", "plans", "cached_plans")
#: Columns of the table that ranks gather in a step, one row for each rank.
_COLUMNS = ("loss", "counted", *_SUMMED_FIELDS, "waiting_seconds", "digest", "stop")
_ADVICE = "lower train.lr, or clip more (train.clip_grad); the step was not kept, and checkpoints are untouched"


@dataclass(frozen=True)
class StepSums:
    """Sums of a step's micro-batches over all ranks.

    Attributes:
        loss: mean over all counted tokens.
        tokens, documents: their numbers in the step's rows.
        imbalance: attention work of the slowest rank over the mean.
        replica_imbalance: modelled time of the slowest replica over the mean.
        planning_seconds: dispatch and planning, in the loader's thread, on the rank where they took longest.
        waiting_seconds: time that the training thread waited for micro-batches, on the rank where it waited longest.
        plans, cached_plans: number of plans of all replicas, and how many of them were in the cache.
        algorithms: number of this replica's rows by algorithm.
        stop: True if any rank was asked to stop.
        data: state of the data stream behind the step's last row.
    """

    loss: float
    tokens: int
    documents: int
    imbalance: float
    replica_imbalance: float
    planning_seconds: float
    waiting_seconds: float
    plans: int
    cached_plans: int
    algorithms: dict[str, int]
    stop: bool
    data: dict[str, Any]


@dataclass(frozen=True)
class StepResult(StepSums):
    """Result of an optimizer step: its sums, the norm of its gradient and its learning rate."""

    grad_norm: float
    lr: float


def run_step(
    training: TrainingModel,
    batches: Iterator[MicroBatch],
    step: int,
    world: World,
    stop_request: StopRequest,
    compare_digests: bool = False,
) -> StepResult:
    """Run one optimizer step over this replica's micro-batches; replicas may have different numbers of them.

    Args:
        training: model, optimizer and schedule.
        batches: micro-batches of this rank.
        step: number of the step, from 1.
        world: this rank among all.
        stop_request: request to stop this rank.
        compare_digests: compare the dispatched batches of all ranks before computing.

    Raises:
        ConfigError: Loss or gradient norm are not finite, or ranks dispatched the documents differently; names the
            step and the ranks.
    """
    sums = forward_backward(training, batches, step, world, stop_request, compare_digests)
    training.schedule.step(1)  # before the update: the first step already moves, the last one has min_lr
    lr = training.optimizer.param_groups[0]["lr"]
    with timed_span("optimizer"):
        _, norm, _ = training.optimizer.step()
        grad_norm = float(norm)
    if not math.isfinite(grad_norm):
        raise ConfigError(f"step {step}: the gradient's norm is {grad_norm}, while the loss is finite; {_ADVICE}")
    return StepResult(**vars(sums), grad_norm=grad_norm, lr=lr)


def forward_backward(
    training: TrainingModel,
    batches: Iterator[MicroBatch],
    step: int,
    world: World,
    stop_request: StopRequest,
    compare_digests: bool = False,
) -> StepSums:
    """Compute the gradients of a step without updating the weights; arguments and errors as in `run_step`."""
    training.ddp_model.zero_grad_buffer()  # type: ignore[operator]
    training.optimizer.zero_grad()
    feed = _MicroBatchFeed(batches)
    if compare_digests:
        _check_digests(world.gather([feed.digest])[:, 0], step)
    reports = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=feed,
        model=[training.ddp_model],
        num_microbatches=feed.micro_batches,
        seq_length=0,  # used by pipelines only
        micro_batch_size=1,
        forward_only=False,
    )
    loss, counted = (float(sum(float(report[REPORT_KEY][i]) for report in reports)) for i in (0, 1))
    with timed_span("gather"):
        table = world.gather(
            [loss, counted, *feed.sums.values(), feed.waiting_seconds, feed.digest, stop_request.reason is not None]
        )
    ranks = dict(zip(_COLUMNS, table.unbind(1), strict=True))
    _check_losses(ranks["loss"], step)
    _check_digests(ranks["digest"], step)
    return _sums(ranks, feed, world)


def _sums(ranks: dict[str, Tensor], feed: _MicroBatchFeed, world: World) -> StepSums:
    """Return the sums of a step from the gathered columns, each fp64 [ranks]."""

    def total(name: str) -> int:
        """Return the sum over replicas, of which every rank counts whole rows."""
        return int(ranks[name][:: world.tp_size][:: world.cp_size].sum())

    # Tensor-parallel ranks hold the same tokens.
    loss, counted, pairs = (ranks[name][:: world.tp_size] for name in ("loss", "counted", "visible_pairs"))
    return StepSums(
        loss=float(loss.sum() / counted.sum().clamp(min=1)),
        tokens=total("tokens"),
        documents=total("documents"),
        imbalance=float(pairs.max() / pairs.mean()) if pairs.sum() else 1.0,
        replica_imbalance=feed.imbalance,
        planning_seconds=float(ranks["planning_seconds"].max()),
        waiting_seconds=float(ranks["waiting_seconds"].max()),
        plans=total("plans"),
        cached_plans=total("cached_plans"),
        algorithms=dict(feed.algorithms),
        stop=bool(torch.any(ranks["stop"] > 0)),
        data=feed.state,
    )


class _MicroBatchFeed:
    """Iterator over a step's micro-batches for Megatron's schedule; only those in use keep their plans alive.

    Attributes:
        micro_batches: their number on this replica.
        digest, imbalance, state: those of their global batch.
        sums: sums of _SUMMED_FIELDS, by name.
        waiting_seconds: time spent waiting for them.
        algorithms: number of micro-batches by algorithm.
    """

    def __init__(self, batches: Iterator[MicroBatch]) -> None:
        self._batches = batches
        self.sums, self.waiting_seconds = dict.fromkeys(_SUMMED_FIELDS, 0.0), 0.0
        self.algorithms: Counter[str] = Counter()
        first = self._take()
        self.micro_batches, self.digest, self.imbalance = first.micro_batches, float(first.digest), first.imbalance
        self.state = first.state
        self._first: MicroBatch | None = first

    def __iter__(self) -> _MicroBatchFeed:
        return self

    def __next__(self) -> MicroBatch:
        micro, self._first = self._first or self._take(), None
        for name in _SUMMED_FIELDS:
            self.sums[name] += getattr(micro, name)
        self.algorithms[micro.algorithm_choice.word] += 1
        return micro

    def _take(self) -> MicroBatch:
        began = time.perf_counter()
        micro = next(self._batches)
        self.waiting_seconds += time.perf_counter() - began
        return micro


def _check_losses(losses: Tensor, step: int) -> None:
    bad = [rank for rank, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
    if bad:
        kind = "NaN" if losses.isnan().any() else "infinite"
        ranks = f"rank {bad[0]}" if len(bad) == 1 else f"ranks {', '.join(map(str, bad))}"
        raise ConfigError(f"step {step}: the loss is {kind} on {ranks} of {len(losses)}; {_ADVICE}")


def _check_digests(digests: Tensor, step: int) -> None:
    """Raise ConfigError, naming the ranks, unless all ranks dispatched the global batch equally."""
    values, counts = digests.unique(return_counts=True)
    if len(values) == 1:
        return
    majority = values[counts.argmax()]
    different = (digests != majority).nonzero()[:, 0].tolist()
    ranks = f"rank {different[0]} has" if len(different) == 1 else f"ranks {', '.join(map(str, different))} have"
    raise ConfigError(
        f"step {step}: {ranks} assigned documents to replicas differently from the other ranks of "
        f"{len(digests)}; every rank needs the same settings, data.corpus and version of this package; the step was "
        "not kept, and checkpoints are untouched"
    )


def _forward(batches: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Any]:
    """Run Megatron's forward step function."""
    micro = next(batches)
    batch = micro.batch
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=micro.params,
        padding_mask=micro.params.padding_mask(batch["tokens"].device) if micro.params.linear_padding else None,
    )
    return losses, partial(loss_function, batch["loss_mask"])
