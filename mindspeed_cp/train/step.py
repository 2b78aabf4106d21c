"""One optimizer step: this replica's micro-batches, the gradients of all, and what all ranks have to say of it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from mindspeed_cp.engine.clock import span
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import loss_function, megatron_imports
from mindspeed_cp.megatron.loss import REPORT_KEY
from mindspeed_cp.train.batches import MicroBatch
from mindspeed_cp.train.model import Parts
from mindspeed_cp.train.stop import StopRequest
from mindspeed_cp.train.world import World

with megatron_imports():
    from megatron.core.pipeline_parallel import get_forward_backward_func

#: What a step adds up over its micro-batches.
_SUMMED = ("work", "tokens", "documents", "planning", "plans", "known")
_ADVICE = "lower train.lr, or clip more (train.clip_grad); the step was not kept, and checkpoints are untouched"


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, over all ranks.

    Attributes:
        loss: mean over all counted tokens.
        grad_norm, lr: of this step.
        tokens, documents: of its rows.
        imbalance: attention work of the slowest rank over that of the mean rank.
        replica_imbalance: modelled time of the slowest replica over the mean.
        planning: seconds of dealing and planning, on the rank where they took longest, in the thread that makes
            batches.
        waiting: seconds that the training thread waited for micro-batches, on the rank where it waited longest.
        plans, known: plans of all replicas, and how many of them had been made before.
        algorithms: which this replica's rows took, and how many took each.
        stop: True if any rank was asked to stop.
        data: state of the data stream behind the step's last row.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    documents: int
    imbalance: float
    replica_imbalance: float
    planning: float
    waiting: float
    plans: int
    known: int
    algorithms: dict[str, int]
    stop: bool
    data: dict[str, Any]


def run_step(
    parts: Parts, batches: Iterator[MicroBatch], step: int, world: World, stop: StopRequest, checked: bool = False
) -> StepResult:
    """One optimizer step over this replica's micro-batches of a global batch; replicas may have unequal numbers.

    Args:
        parts, batches, world, stop: of this rank.
        step: its number, from 1.
        checked: compare what ranks are about to compute before they do.

    Raises:
        ConfigError: loss or gradient norm are no numbers, or ranks have dealt the documents otherwise; names the step
            and the ranks.
    """
    parts.wrapped.zero_grad_buffer()  # type: ignore[operator]
    parts.optimizer.zero_grad()
    feed = _Feed(batches)
    if checked:
        _check_digests(world.gather([feed.digest])[:, 0], step)
    reports = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=feed,
        model=[parts.wrapped],
        num_microbatches=feed.count,
        seq_length=0,  # is of pipelines
        micro_batch_size=1,
        forward_only=False,
    )
    total, counted = (float(sum(float(r[REPORT_KEY][i]) for r in reports)) for i in (0, 1))
    own = [total, counted, *feed.sums.values()]
    with span("gather"):
        everyone = world.gather([*own, feed.waited, feed.digest, float(stop.reason is not None)])
    _check_losses(everyone[:, 0], step)
    _check_digests(everyone[:, -2], step)
    rows = everyone[:: world.tp]  # tensor-parallel ranks hold the same tokens
    parts.schedule.step(1)  # before the step: the first one already moves, the last one has min_lr
    lr = parts.optimizer.param_groups[0]["lr"]
    with span("optimizer"):
        _, norm, _ = parts.optimizer.step()
        grad_norm = float(norm)
    if not math.isfinite(grad_norm):
        raise ConfigError(f"step {step}: the gradient's norm is {grad_norm}, while the loss is a number; {_ADVICE}")
    work = rows[:, 2 + _SUMMED.index("work")]
    # Every rank of a replica counts whole rows.
    tokens, documents, plans, known = (
        int(rows[:: world.cp, 2 + _SUMMED.index(name)].sum()) for name in ("tokens", "documents", "plans", "known")
    )
    return StepResult(
        loss=float(rows[:, 0].sum() / rows[:, 1].sum().clamp(min=1)),
        grad_norm=grad_norm,
        lr=lr,
        tokens=tokens,
        documents=documents,
        imbalance=float(work.max() / work.mean()) if work.sum() else 1.0,
        replica_imbalance=feed.imbalance,
        planning=float(everyone[:, 2 + _SUMMED.index("planning")].max()),
        waiting=float(everyone[:, -3].max()),
        plans=plans,
        known=known,
        algorithms=dict(feed.algorithms),
        stop=bool(everyone[:, -1].any()),
        data=feed.state,
    )


class _Feed:
    """A step's micro-batches for Megatron's schedule, one at a time: only those under way keep their plans alive.

    Attributes:
        count: how many they are on this replica.
        digest, imbalance, state: of their global batch.
        sums: of what is added up over them, by name.
        waited: seconds until they were there.
        algorithms: that they took, and how many took each.
    """

    def __init__(self, batches: Iterator[MicroBatch]) -> None:
        self._batches = batches
        self.sums, self.waited = dict.fromkeys(_SUMMED, 0.0), 0.0
        self.algorithms: Counter[str] = Counter()
        first = self._take()
        self.count, self.digest, self.imbalance = first.count, float(first.digest), first.imbalance
        self.state = first.state
        self._first: MicroBatch | None = first

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> MicroBatch:
        micro, self._first = self._first or self._take(), None
        for name in _SUMMED:
            self.sums[name] += getattr(micro, name)
        self.algorithms[micro.chosen.word] += 1
        return micro

    def _take(self) -> MicroBatch:
        began = time.perf_counter()
        micro = next(self._batches)
        self.waited += time.perf_counter() - began
        return micro


def _check_losses(losses: Tensor, step: int) -> None:
    bad = [rank for rank, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
    if bad:
        kind = "NaN" if losses.isnan().any() else "infinite"
        ranks = f"rank {bad[0]}" if len(bad) == 1 else f"ranks {', '.join(map(str, bad))}"
        raise ConfigError(f"step {step}: the loss is {kind} on {ranks} of {len(losses)}; {_ADVICE}")


def _check_digests(digests: Tensor, step: int) -> None:
    """ConfigError, naming the ranks, unless all ranks have dealt the global batch alike."""
    values, counts = digests.unique(return_counts=True)
    if len(values) == 1:
        return
    most = values[counts.argmax()]
    odd = (digests != most).nonzero()[:, 0].tolist()
    ranks = f"rank {odd[0]} has" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} have"
    raise ConfigError(
        f"step {step}: {ranks} dealt other documents to the replicas, or dealt them otherwise, than the other ranks of "
        f"{len(digests)}; every rank needs the same settings, data.corpus and version of this package; the step was "
        "not kept, and checkpoints are untouched"
    )


def _forward(batches: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Any]:
    """Megatron's forward step."""
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
