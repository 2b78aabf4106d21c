"""One optimizer step: forward and backward of this replica's micro-batches, and the update after all ranks' sums."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_cp.engine.attention_check import AttentionCheck
from mindspeed_cp.errors import CorruptionError, DivergenceError
from mindspeed_cp.megatron import loss_function, megatron_imports
from mindspeed_cp.megatron.adaptors.loss import REPORT_KEY
from mindspeed_cp.schema.messages import name_ranks
from mindspeed_cp.train.checks import BadStepPolicy, QueueProbe, check_assignment
from mindspeed_cp.train.failures import StopRequest
from mindspeed_cp.train.micro_batch_loader import MicroBatch
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.world import World

with megatron_imports():
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

#: Columns of the table that ranks gather in a step, one row for each rank.
_COLUMNS = ("loss", "counted", "visible_pairs", "planning_seconds", "waiting_seconds", "stop", "gradient")


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step, summed over all ranks.

    Attributes:
        loss: mean over all counted tokens.
        figures: for metrics.jsonl: `tokens` and `documents` of the step's rows; `imbalance`, attention work of the
            slowest rank over the mean; `replica_imbalance`, modelled time of the slowest replica over the mean;
            `pooled`, whether the ranks of all replicas computed the step together; `planning_seconds` in the loader's
            thread and `waiting_seconds` of the training thread for micro-batches, each on the rank where they took
            longest.
        stop: True if any rank was asked to stop.
        data: state of the data stream behind the step's last row.
        nonfinite: what is not finite in loss or gradients, and on which ranks; None: nothing.
        lr: learning rate.
        grad_norm: norm of the gradient; not a number where the update was left out.
        problem: what is wrong with the step's loss or gradient, for which the weights were left as they are; or None.
    """

    loss: float
    figures: dict[str, Any]
    stop: bool
    data: dict[str, Any]
    nonfinite: str | None = None
    lr: float = 0.0
    grad_norm: float = math.nan
    problem: str | None = None


def run_step(
    training: TrainingModel,
    batches: Iterator[MicroBatch],
    step: int,
    stop_request: StopRequest,
    queue: QueueProbe,
    attention_check: AttentionCheck | None,
    policy: BadStepPolicy,
    losses: Sequence[float],
) -> StepResult:
    """Run one optimizer step over this replica's micro-batches; replicas may have different numbers of them.

    Args:
        training: model, optimizer and schedule of this rank.
        batches: micro-batches of this rank.
        step: number of the step, from 1.
        stop_request: request to stop this rank.
        queue: tells that the device makes no calls any more, before ranks meet and after the weights are changed.
        attention_check: compares a part of the step's attention with the reference, before the weights are changed.
        policy: decides what follows a bad step.
        losses: losses of earlier steps.

    Raises:
        ConfigError: Ranks dispatched the documents differently; names the step and the ranks.
        CorruptionError: Attention is not what the reference computes.
        DivergenceError: Loss or gradient are not finite, or the loss is a spike, and the policy is to stop.
        OperatorError: The device makes no calls any more.
    """
    sums = forward_backward(training, batches, step, stop_request, queue, attention_check)
    training.schedule.step(1)  # before the update: the first step already moves, the last one has min_lr
    lr = training.optimizer.param_groups[0]["lr"]
    problem = policy.problem(step, sums.nonfinite, sums.loss, losses)
    if problem is not None:
        return replace(sums, lr=lr, problem=problem)
    _, norm, _ = training.optimizer.step()
    grad_norm = float(norm)
    queue.check(step)
    if not math.isfinite(grad_norm):  # though that of each rank's share is finite, and the update is done
        raise DivergenceError(f"step {step}: the gradient's norm is {grad_norm}; checkpoints are untouched")
    return replace(sums, lr=lr, grad_norm=grad_norm)


def forward_backward(
    training: TrainingModel,
    batches: Iterator[MicroBatch],
    step: int,
    stop_request: StopRequest,
    queue: QueueProbe,
    attention_check: AttentionCheck | None = None,
) -> StepResult:
    """Compute the gradients of a step without updating the weights; arguments and errors as in `run_step`, but losses
    that are not finite are only told."""
    world = training.world
    training.ddp_model.zero_grad_buffer()
    training.optimizer.zero_grad()
    feed = _MicroBatchFeed(batches, attention_check)
    check_assignment(world.gather([float(feed.dispatched.digest)])[:, 0], step)
    reports = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=feed,
        model=training.ddp_model,
        num_microbatches=feed.micro_batches,
        seq_length=1,  # not used without pipeline stages
        micro_batch_size=1,
        forward_only=False,
    )
    loss, counted = (float(sum(float(report[REPORT_KEY][i]) for report in reports)) for i in (0, 1))
    queue.check(step)  # before ranks wait for each other on the host
    is_asked_to_stop = float(stop_request.reason is not None)
    norm = _gradient_norm(training.ddp_model)
    table = world.gather([loss, counted, *feed.sums, is_asked_to_stop, norm])
    ranks = dict(zip(_COLUMNS, table.unbind(1), strict=True))
    nonfinite = _nonfinite(ranks["loss"], "the loss") or _nonfinite(ranks["gradient"], "the gradient's norm")
    if nonfinite is None and attention_check is not None:
        group = world.plan_group(feed.dispatched.pooled)
        for different in filter(None, world.gather_objects(attention_check.compare(group))):
            raise CorruptionError(
                f"step {step}: {different}; the step was not kept, and the same command goes on from the newest "
                "checkpoint; if it happens again on that rank, take its device or machine out"
            )
    return _sums(ranks, feed, world, nonfinite)


def _gradient_norm(ddp_model: DistributedDataParallel) -> float:
    """Return the norm of this rank's gradients after the reduction, which shows whether one is not finite."""
    buffers = (*ddp_model.buffers, *ddp_model.expert_parallel_buffers)
    norms = [torch.linalg.vector_norm(buffer.grad_data) for buffer in buffers]
    return float(torch.stack(norms).sum())


def _nonfinite(values: Tensor, name: str) -> str | None:
    """Return which of the ranks' values are not finite, or None."""
    bad = [rank for rank, value in enumerate(values.tolist()) if not math.isfinite(value)]
    if not bad:
        return None
    kind = "NaN" if values.isnan().any() else "infinite"
    return f"{name} is {kind} on {name_ranks(bad)} of {len(values)}"


def _sums(ranks: dict[str, Tensor], feed: _MicroBatchFeed, world: World, nonfinite: str | None) -> StepResult:
    """Return the sums of a step from the gathered columns, each fp64 [ranks]."""
    # Tensor-parallel ranks hold the same tokens.
    loss, counted, pairs = (ranks[name][:: world.tp_size] for name in ("loss", "counted", "visible_pairs"))
    lengths = feed.dispatched.chunks["length"]
    figures = {
        "tokens": int(lengths.sum()),
        "documents": len(lengths),
        "imbalance": float(pairs.max() / pairs.mean()) if pairs.sum() else 1.0,
        "replica_imbalance": feed.dispatched.imbalance,
        "pooled": feed.dispatched.pooled,
        **{name: float(ranks[name].max()) for name in ("planning_seconds", "waiting_seconds")},
    }
    mean = float(loss.sum() / counted.sum().clamp(min=1))
    return StepResult(mean, figures, bool(torch.any(ranks["stop"] > 0)), feed.state, nonfinite)


class _MicroBatchFeed:
    """Iterator over a step's micro-batches for Megatron's schedule; only those in use keep their plans alive.

    Attributes:
        micro_batches: their number on this replica.
        dispatched, state: those of their global batch.
        sums: of their visible pairs, of the seconds in which they were planned, and of those spent waiting for them.
    """

    def __init__(self, batches: Iterator[MicroBatch], check: AttentionCheck | None = None) -> None:
        self._batches, self._check = batches, check
        self.sums = [0.0, 0.0, 0.0]
        first = self._take()
        self.micro_batches, self.dispatched, self.state = first.count, first.dispatched, first.state
        self._first: MicroBatch | None = first
        self._taken = 0

    def __iter__(self) -> _MicroBatchFeed:
        return self

    def __next__(self) -> MicroBatch:
        micro, self._first = self._first or self._take(), None
        if self._check is not None and self._check.watches(self._taken, self.micro_batches):
            micro.params.attention_check = self._check
        self._taken += 1
        return micro

    def _take(self) -> MicroBatch:
        began = time.perf_counter()
        micro = next(self._batches)
        added = (micro.visible_pairs, micro.planning_seconds, time.perf_counter() - began)
        self.sums = [total + more for total, more in zip(self.sums, added, strict=True)]
        return micro


def _forward(batches: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Any]:
    """Run Megatron's forward step function."""
    micro = next(batches)
    output = model(
        micro.batch["tokens"],
        micro.batch["position_ids"],
        None,
        labels=micro.batch["labels"],
        packed_seq_params=micro.params,
        **micro.params.padding_arguments(model),
    )
    return output, partial(loss_function, micro.batch["loss_mask"])
