"""Checks that all ranks train on the same documents with the same settings: at the start, and in every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import Corpus, different_documents
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.messages import format_value, name_ranks
from mindspeed_cp.train.world import World

#: Settings in which the machines of a run may differ.
_OF_MACHINES = {
    "data.corpus",  # its contents are compared
    "train.device",
    "train.threads_per_rank",
    "train.prefetch_micro_batches",
    "output.progress",
    "output.log_interval",
}


def check_same_start(settings: Settings, world: World, corpus: Corpus, contents: Sequence[str]) -> None:
    """Compare settings and corpora of all ranks; every rank calls it.

    Args:
        settings: settings of this rank.
        world: this rank among all.
        corpus: corpus of this rank.
        contents: digests of its contents.

    Raises:
        ConfigError: ranks differ; names them and the first setting or the documents that differ.
    """
    of_ranks = world.gather_objects([_compared_settings(settings), [len(corpus.lengths), *contents]])
    settings_of_ranks, corpora = zip(*of_ranks, strict=True)
    for key in settings_of_ranks[0]:
        values = [of_rank.get(key) for of_rank in settings_of_ranks]
        different = _minority(list(map(repr, values)))
        if different:
            usual = next(value for rank, value in enumerate(values) if rank not in different)
            raise ConfigError(
                f"{key} = {format_value(values[different[0]])} on {name_ranks(different)}, {format_value(usual)} on "
                f"the others of {world.size}; give all ranks the same settings"
            )
    different = _minority(list(map(repr, corpora)))
    if different:
        usual = next(corpus for rank, corpus in enumerate(corpora) if rank not in different)
        count, *digests = corpora[different[0]]
        where = f"{count} documents, not {usual[0]}"
        if count == usual[0]:
            where = f"other contents in {different_documents(digests, usual[1:], count)}"
        raise ConfigError(
            f"data.corpus has {where}, on {name_ranks(different)} of {world.size}; give all ranks the same files"
        )


def _compared_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that all ranks must share, by dotted key."""
    values: dict[str, Any] = {}
    for name, section in settings.model_dump(mode="json").items():
        values |= {f"{name}.{key}": value for key, value in section.items() if f"{name}.{key}" not in _OF_MACHINES}
    return values


def check_digests(digests: Tensor, step: int, replica_ranks: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError, naming the ranks, unless all ranks have dispatched and read the same global batch.

    Args:
        digests: fp64 [ranks, 3]: of the documents and their replicas, of the contents of the replica's rows, and of the
            contents of one document that all ranks read.
        step: number of the step.
        replica_ranks: the ranks of each data-parallel replica.
    """
    dispatched, contents, sample = digests.T.tolist()
    size = len(dispatched)
    kept = "the step was not kept, and checkpoints are untouched"
    different, is_tie = _suspects(dispatched)
    if different:
        raise ConfigError(
            f"step {step}: {name_ranks(different, 'has', 'have')} assigned documents to replicas differently "
            f"{_from_whom(is_tie, size)}; every rank needs the same settings, data.corpus and version of this "
            f"package; {kept}"
        )
    different, is_tie = _suspects(sample)
    for ranks in replica_ranks if not different else ():
        of_replica, is_split = _suspects([contents[rank] for rank in ranks])
        different += [ranks[index] for index in of_replica]
        is_tie |= is_split
    if different:
        raise ConfigError(
            f"step {step}: {name_ranks(sorted(different))} of {size} read the contents of the same documents "
            f"differently {_from_whom(is_tie, size)}; every rank needs the same files in data.corpus; {kept}"
        )


def check_calls(digests: Tensor, step: int, world: World, pools: int = 0) -> None:
    """Raise ConfigError, naming the ranks, unless all ranks of each plan have called attention alike.

    Args:
        digests: fp64 [ranks]: of the plans, types and dropout keys of the calls of the last micro-batch; those before
            are compared with the announcement of the next one.
        step: number of the step.
        world: this rank among all.
        pools: number of pools that plans are over; 0: over context-parallel ranks.
    """
    of_plan = world.cp_size * world.replicas_of_plan(pools)
    ranks = torch.arange(world.size).view(-1, of_plan, world.tp_size).mT.reshape(-1, of_plan)
    different, is_tie = [], False
    for group in ranks.tolist():
        suspects, is_split = _suspects(digests[group].tolist())
        different += [group[index] for index in suspects]
        is_tie |= is_split
    if different:
        raise ConfigError(
            f"step {step}: {name_ranks(sorted(different))} called attention differently (plans, types or dropout keys) "
            f"{_from_whom(is_tie, world.size)}; the step was not kept, and checkpoints are untouched"
        )


def _from_whom(is_tie: bool, size: int) -> str:
    return "from each other, and any of them may be wrong" if is_tie else f"from the other ranks of {size}"


def _minority(values: Sequence[Any]) -> list[int]:
    """Return the indices of all values but the most frequent one, of equally frequent ones the first."""
    usual = max(values, key=values.count)
    return [index for index, value in enumerate(values) if value != usual]


def _suspects(values: Sequence[Any]) -> tuple[list[int], bool]:
    """Return the indices of all values but the most frequent one, and False; if no value is the most frequent one, all
    indices and True."""
    counts = Counter(values).most_common(2)
    if len(counts) == 2 and counts[0][1] == counts[1][1]:
        return list(range(len(values))), True
    return _minority(values), False
