"""What ends a start or a step before wrong numbers are kept: settings or corpora that differ between ranks or from
those of a checkpoint, a loss or gradient that is not finite, a spike, and an NPU that makes no calls any more."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError, DivergenceError, OperatorError
from mindspeed_cp.schema.messages import format_value, name_ranks
from mindspeed_cp.train.world import World

#: Settings in which the machines of a run may differ.
_OF_MACHINES = {
    "data.corpus",  # its digest is compared
    "train.device",
    "train.threads_per_rank",
    "output.log_interval",
}


def check_same_start(world: World, corpus_digest: str) -> None:
    """Compare settings and corpora of all ranks; every rank calls it.

    Raises:
        ConfigError: ranks differ; names them, and the first setting that differs or the corpus.
    """
    everything = flat_settings(world.settings.model_dump(mode="json"))
    shared = {key: value for key, value in everything.items() if key not in _OF_MACHINES}
    of_ranks = world.gather_objects(shared | {"data.corpus": corpus_digest})
    for key in of_ranks[0]:
        values = [of_rank.get(key) for of_rank in of_ranks]
        different = _minority(list(map(repr, values)))
        if different and key == "data.corpus":
            raise ConfigError(
                f"data.corpus has other documents on {name_ranks(different)} of {world.size}; give all ranks the same "
                "files"
            )
        if different:
            usual = next(value for rank, value in enumerate(values) if rank not in different)
            raise ConfigError(
                f"{key} = {format_value(values[different[0]])} on {name_ranks(different)}, {format_value(usual)} on "
                f"the others of {world.size}; give all ranks the same settings"
            )


def check_assignment(digests: Tensor, step: int) -> None:
    """Raise ConfigError, naming the ranks, unless all ranks have assigned the documents of a step alike.

    Args:
        digests: of the assignments, fp64 [ranks].
        step: number of the step.
    """
    different = _minority(digests.tolist())
    if different:
        raise ConfigError(
            f"step {step}: {name_ranks(different)} and the others of {len(digests)} assigned documents to replicas "
            "differently; every rank needs the same settings, data.corpus and version of this package; the step was "
            "not kept, and checkpoints are untouched"
        )


def _minority(values: Sequence[Any]) -> list[int]:
    """Return the indices of all values but the most frequent one, of equally frequent ones the first."""
    usual = max(values, key=values.count)
    return [index for index, value in enumerate(values) if value != usual]


# The settings that identify a run: a checkpoint can be resumed only with equal ones. They are those that change the
# numbers: model, data, order, schedule. How the work is split over ranks, recomputed or shown changes only rounding, so
# a run may be resumed with other ranks. The rates of the optimizer may change, as a run whose loss diverges needs.

_TRAIN = ("global_batch_size", "lr_decay_style", "lr_warmup_iters", "bf16", "seed")


def identity(settings: Settings) -> dict[str, Any]:
    """Return the settings that identify a run, by dotted key, with defaults that depend on others filled in."""
    model, data, train = settings.model, settings.data, settings.train
    filled = {
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.resolved_ffn_hidden_size,
    }
    values = flat_settings({"model": {**model.model_dump(), **filled}, "data": data.model_dump()})
    del values["model.recompute_granularity"]
    if not model.attention_dropout:  # else the dropped weights depend on the rows
        del values["data.balance"]
    elif data.balance == "pool":  # documents keep the numbers by which weights are dropped, as with time
        values["data.balance"] = "time"
    values |= {f"train.{key}": getattr(train, key) for key in _TRAIN}
    if train.lr_decay_style != "constant":
        values["train.lr_decay_iters"] = train.lr_decay_iters or train.train_iters
    return values


def check_same_run(settings: Settings, saved: dict[str, Any], checkpoint: str) -> None:
    """Raise ConfigError, naming the settings, unless a checkpoint belongs to these settings.

    Args:
        settings: the present settings.
        saved: the identity that the checkpoint has; data.corpus may have been moved, and its contents are compared.
        checkpoint: its folder.
    """
    old, new = saved | {"data.corpus": settings.data.corpus}, identity(settings)
    changes = {
        key: f"{key} was {format_value(old.get(key))} and is {format_value(new.get(key))}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    }
    if not changes:
        return
    decay = "train.lr_decay_iters"
    longer = f" (to train longer on the old schedule: {decay} = {saved[decay]})" if [*changes] == [decay] else ""
    raise ConfigError(
        f"{checkpoint} belongs to other settings: {'; '.join(changes.values())}; "
        f"resume with the old settings{longer}, or give another output.folder"
    )


def flat_settings(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of all sections by dotted key."""
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


# Steps whose loss or gradient is not finite, or whose loss is a spike: train.nonfinite_policy. All ranks decide alike,
# from figures that they have gathered, so nothing is sent.

HISTORY = 64  # losses that a spike is measured against
LEAST_HISTORY = 16  # fewer say nothing
MAD_FLOOR = 0.01  # of the median: a flat curve would make every loss a spike
SKIPS_IN_A_ROW = 10

_ADVICE = "lower train.lr or clip more (train.clip_grad), which a resumed run may"


def spike_limit(losses: Sequence[float], mads: float) -> float:
    """Return the loss above which a step is a spike: the median of earlier losses plus `mads` times their median
    absolute deviation (MAD), which counts as at least 1 % of the median.

    Args:
        losses: losses of earlier steps, the newest last; infinity is returned for fewer than LEAST_HISTORY.
        mads: train.spike_mads; 0: infinity is returned.
    """
    if not mads or len(losses) < LEAST_HISTORY:
        return math.inf
    middle = median(losses)
    deviation = median(abs(loss - middle) for loss in losses)
    return middle + mads * max(deviation, MAD_FLOOR * abs(middle))


class BadStepPolicy:
    """Ends the run at a bad step, or has it skipped.

    Args:
        settings: settings of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self._skips, self._mads = settings.train.nonfinite_policy == "skip", settings.train.spike_mads
        self._in_a_row = 0

    def problem(self, step: int, nonfinite: str | None, loss: float, losses: Sequence[float]) -> str | None:
        """Return why a step is to be skipped, or None: its weights are to be updated.

        Args:
            step: number of the step.
            nonfinite: what is not finite, and where, or None.
            loss: its loss.
            losses: losses of earlier steps.

        Raises:
            DivergenceError: the policy is to stop, or too many steps in a row were skipped.
        """
        limit = spike_limit(losses, self._mads)
        if nonfinite is None and loss <= limit:
            self._in_a_row = 0
            return None
        problem = nonfinite or (
            f"the loss of {loss:.4g} is a spike, above {limit:.4g}: the median of {len(losses)} steps and "
            f"{self._mads:g} MAD"
        )
        if not self._skips:
            raise DivergenceError(
                f"step {step}: {problem}; {_ADVICE}, or set train.nonfinite_policy: skip; the step was not kept, and "
                "checkpoints are untouched"
            )
        self._in_a_row += 1
        if self._in_a_row > SKIPS_IN_A_ROW:
            raise DivergenceError(f"step {step}: {problem}, after {SKIPS_IN_A_ROW} skipped steps in a row; {_ADVICE}")
        return problem


class QueueProbe:
    """Checks that copies to an NPU take place; on other devices, which have no such thread, it does nothing.

    A thread of torch-npu makes the calls of CANN and HCCL (TASK_QUEUE_ENABLE 1 and 2). After a call that fails there
    it drops all later ones, and raises once, at the next call that enqueues or waits. If the destructor of an event is
    that call, the error is lost, by torch-npu's source: operators, messages and copies do nothing, and the host reads
    what lay in the memory before. So every step copies another number to the device without a wait, which goes through
    that thread, and reads it.

    Args:
        device: device of this rank.
        rank: number of this rank, for the error.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._rank = rank
        self._number = torch.zeros(1, dtype=torch.int64).pin_memory() if device.type == "npu" else None
        self._copy = torch.zeros(1, dtype=torch.int64, device=device)

    def check(self, step: int) -> None:
        """Copy the next number, of 8 bytes, and wait for it.

        Raises:
            OperatorError: it did not arrive; names the step and the rank.
        """
        if self._number is None:
            return
        self._number += 1
        self._copy.copy_(self._number, non_blocking=True)
        if int(self._copy) == int(self._number):
            return
        raise OperatorError(
            f"step {step}, rank {self._rank}: torch-npu makes no calls any more (a copy to the NPU was dropped): an "
            "earlier call failed in its queue, and the error was lost; its log on standard error says which, and "
            f"TASK_QUEUE_ENABLE=0 (now {os.environ.get('TASK_QUEUE_ENABLE', 'not set')}) raises at the call; the step "
            "is void, the same command goes on from the newest checkpoint"
        )
