"""Checks that all ranks train on the same documents with the same settings, at the start and in every step, and that an
NPU makes its calls."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError, OperatorError
from mindspeed_cp.schema.messages import format_value, name_ranks
from mindspeed_cp.train.identity import flat_settings
from mindspeed_cp.train.world import World

#: Settings in which the machines of a run may differ.
_OF_MACHINES = {
    "data.corpus",  # its digest is compared
    "train.device",
    "train.threads_per_rank",
    "train.prefetch_micro_batches",
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


def check_digests(digests: Tensor, step: int, replica_ranks: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError, naming the ranks, unless all ranks have dispatched and read the same global batch.

    Args:
        digests: fp64 [ranks, 3]: of the documents and their replicas, of the contents of the replica's rows, and of the
            contents of one document that all ranks read.
        step: number of the step.
        replica_ranks: the ranks of each data-parallel replica.
    """
    dispatched, contents, sample = digests.T
    size = len(dispatched)
    kept = "the step was not kept, and checkpoints are untouched"
    different, is_tie = _suspects_in(dispatched, [range(size)])
    if different:
        raise ConfigError(
            f"step {step}: {name_ranks(different, 'has', 'have')} assigned documents to replicas differently "
            f"{_from_whom(is_tie, size)}; every rank needs the same settings, data.corpus and version of this "
            f"package; {kept}"
        )
    different, is_tie = _suspects_in(sample, [range(size)])
    if not different:
        different, is_tie = _suspects_in(contents, replica_ranks)
    if different:
        raise ConfigError(
            f"step {step}: {name_ranks(different)} of {size} read the contents of the same documents "
            f"differently {_from_whom(is_tie, size)}; every rank needs the same files in data.corpus; {kept}"
        )


def check_calls(digests: Tensor, step: int, plan_ranks: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError, naming the ranks, unless all ranks of each plan have called attention alike.

    Args:
        digests: fp64 [ranks]: of the plans, types and dropout keys of the calls of the last micro-batch; those before
            are compared with the announcement of the next one.
        step: number of the step.
        plan_ranks: the ranks of each plan.
    """
    different, is_tie = _suspects_in(digests, plan_ranks)
    if different:
        raise ConfigError(
            f"step {step}: {name_ranks(different)} called attention differently (plans, types or dropout keys) "
            f"{_from_whom(is_tie, len(digests))}; the step was not kept, and checkpoints are untouched"
        )


def _from_whom(is_tie: bool, size: int) -> str:
    return "from each other, and any of them may be wrong" if is_tie else f"from the other ranks of {size}"


def _minority(values: Sequence[Any]) -> list[int]:
    """Return the indices of all values but the most frequent one, of equally frequent ones the first."""
    usual = max(values, key=values.count)
    return [index for index, value in enumerate(values) if value != usual]


def _suspects_in(values: Tensor, groups: Sequence[Sequence[int]]) -> tuple[list[int], bool]:
    """Return the ranks whose value is not the most frequent one of their group, ascending, and False; of a group
    without a most frequent value all ranks, and then True."""
    suspects: list[int] = []
    is_tie = False
    for group in groups:
        of_group = [float(values[rank]) for rank in group]
        counts = Counter(of_group).most_common(2)
        if len(counts) == 2 and counts[0][1] == counts[1][1]:
            suspects += group
            is_tie = True
        else:
            suspects += [group[index] for index in _minority(of_group)]
    return sorted(suspects), is_tie


#: Numbers that are copied in turn: what memory holds by chance is hardly ever the one that is due.
_COUNT = 4096


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
        self._rank, self._checks = rank, 0
        self._numbers = torch.arange(1, _COUNT + 1).pin_memory() if device.type == "npu" else None
        self._copy = torch.zeros(1, dtype=torch.int64, device=device)

    def check(self, step: int) -> None:
        """Copy a number of 8 bytes and wait for it.

        Raises:
            OperatorError: it did not arrive; names the step and the rank.
        """
        if self._numbers is None:
            return
        place = self._checks % _COUNT
        self._checks += 1
        self._copy.copy_(self._numbers[place : place + 1], non_blocking=True)
        if int(self._copy) == place + 1:
            return
        raise OperatorError(
            f"step {step}, rank {self._rank}: torch-npu makes no calls any more (a copy to the NPU was dropped): an "
            "earlier call failed in its queue, and the error was lost; its log on standard error says which, and "
            f"TASK_QUEUE_ENABLE=0 (now {os.environ.get('TASK_QUEUE_ENABLE', 'not set')}) raises at the call; the step "
            "is void, the same command goes on from the newest checkpoint"
        )
