"""Digests of weights and optimizer state, compared over the ranks that must hold equal values.

After each step all replicas of a weight, and of its state of Adam, have the same bits: every replica adds the same
reduced gradient. A rank whose memory or arithmetic failed trains on with other values, and nothing else says so. The
digest of a tensor is the sum of its elements, read as integers, times fixed odd multipliers of their places, modulo
2**64: exact, the same in any order of addition, and different after one element has changed in any way; two elements
that were swapped are found but for a chance of 2**-60. Only when digests differ, a second message looks for the tensor.

What tensor-parallel ranks hold alike (norms, a router) is compared over data- and context-parallel ranks only, and
buffers are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.errors import CorruptionError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.schema.messages import name_ranks
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.stages import name_in_whole_model
from mindspeed_cp.train.world import World

with megatron_imports():
    from megatron.core import parallel_state

BLOCK = 2**16  # elements that have multipliers of their own; the sums of blocks have others
CHUNK = 2**22  # elements that are multiplied at once
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@dataclass(frozen=True)
class _Replicated:
    """One tensor of which other ranks have replicas, and whether it belongs to an expert."""

    name: str
    tensor: Tensor
    is_expert: bool


class ReplicaCheck:
    """Compares the replicas of a training's weights and optimizer state; every rank makes one and calls it alike.

    Args:
        training: model and optimizer. State that a distributed optimizer shards has no replicas and is left out.
        world: this rank among all.
        step: the step whose weights were loaded or made; they are taken to agree.

    Attributes:
        agreed_step: the newest step whose weights agree.
    """

    def __init__(self, training: TrainingModel, world: World, step: int) -> None:
        self._training, self._world, self.agreed_step = training, world, step

    def __call__(self, step: int, checkpoint: str | None) -> None:
        """Compare the digests of all ranks after a step; a collective of 32 bytes from each rank.

        Args:
            step: number of the step that was finished.
            checkpoint: name of the newest checkpoint; each was written after a check, or all ranks loaded it.

        Raises:
            CorruptionError: replicas differ; raised on all ranks, and names ranks, step and tensor.
        """
        tensors = list(_replicated_tensors(self._training))
        digests = digest_all([x.tensor for x in tensors])
        experts = np.array([x.is_expert for x in tensors], bool)
        # Ranks of a pipeline stage with the same number hold the same parts: the tensor-parallel rank, and for experts
        # the expert-parallel.
        stage, stages = self._world.stage, self._world.stages
        parts = [parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()]
        parts = [part * stages + stage for part in parts]
        rows = _gather(np.array([*parts, *(_digest_of(digests[experts == e]) for e in (False, True))]), self._world)
        if not any(differing(rows[:, 2 + e], rows[:, e]) for e in (0, 1)):
            self.agreed_step = step
            return
        names = self._world.gather_json([x.name for x in tensors])
        of_experts = self._world.gather_json(experts.tolist())
        columns = _gather(np.pad(digests, (0, max(map(len, names)) - len(digests))), self._world)
        for first in range(0, self._world.size, self._world.stage_size):  # the stages have other tensors
            for index, name in enumerate(names[first]):
                ranks = slice(first, first + self._world.stage_size)
                differences = differing(columns[ranks, index], rows[ranks, int(of_experts[first][index])], first)
                if differences:
                    raise CorruptionError(_message(differences, name, step, self.agreed_step, checkpoint))
        raise CorruptionError(f"step {step}: digests of weights differ between ranks, those of their tensors do not")


def digest_all(tensors: Sequence[Tensor]) -> np.ndarray:
    """Return the digest of each tensor, int64 [tensors]; one copy from the device of the first."""
    if not tensors:
        return np.zeros(0, np.int64)
    return torch.stack([digest(x).to(tensors[0].device) for x in tensors]).cpu().numpy()


def digest(x: Tensor) -> Tensor:
    """Return the digest of a tensor of any type on its device, int64 []."""
    x = x.detach().contiguous()
    flat = x.view(-1).view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    within, between = _multipliers(0, BLOCK, x.device), _multipliers(1, CHUNK // BLOCK, x.device)
    chunks = flat.split(CHUNK)
    for chunk, multiplier in zip(chunks, _odd_numbers(2, len(chunks)).tolist(), strict=True):
        whole = len(chunk) // BLOCK * BLOCK
        blocks = (chunk[:whole].view(-1, BLOCK) * within).sum(1) if whole else chunk.new_zeros(0, dtype=torch.int64)
        part = (blocks * between[: len(blocks)]).sum()
        if whole < len(chunk):
            part += (chunk[whole:] * within[: len(chunk) - whole]).sum() * between[len(blocks)]
        total += part * multiplier
    return total


def _digest_of(digests: np.ndarray) -> np.int64:
    """Return one digest of many."""
    return (digests * _odd_numbers(3, len(digests))).sum(dtype=np.int64)


@lru_cache
def _odd_numbers(stream: int, count: int) -> np.ndarray:
    """Return fixed random odd numbers, int64 [count]."""
    return np.random.Generator(np.random.PCG64(stream)).integers(-(2**63), 2**63, count, np.int64) | 1


@lru_cache
def _multipliers(stream: int, count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(_odd_numbers(stream, count)).to(device)


def differing(digests: np.ndarray, parts: np.ndarray, first: int = 0) -> list[tuple[list[int], list[int]]]:
    """Return, for each set of ranks with the same part whose digests differ, (the ranks that differ from most of the
    set, most of the set). Where no value has a majority, all ranks are in the first list and the second is empty.

    Args:
        digests: int64 [ranks].
        parts: number of the part that each rank holds, int64 [ranks].
        first: number of the first rank.
    """
    differences = []
    for part in np.unique(parts):
        ranks = np.flatnonzero(parts == part)
        value, count = Counter(digests[ranks].tolist()).most_common(1)[0]
        if count == len(ranks):
            continue
        same = ranks[digests[ranks] == value] if 2 * count > len(ranks) else ranks[:0]
        differences.append(((np.setdiff1d(ranks, same) + first).tolist(), (same + first).tolist()))
    return differences


def _message(
    differences: list[tuple[list[int], list[int]]], name: str, step: int, agreed: int, checkpoint: str | None
) -> str:
    texts = []
    for wrong, right in differences:
        if right:
            texts.append(f"{name_ranks(wrong, 'differs', 'differ')} from {name_ranks(right)}")
        else:
            texts.append(f"{name_ranks(wrong)} differ from each other, any of them may be wrong")
    kept = (
        "checkpoints are whole, since replicas are compared before each save: the same command goes on from "
        f"{checkpoint}"
        if checkpoint is not None
        else "no checkpoint was written: the same command starts anew"
    )
    return (
        f"step {step}: replicas of {name} differ: {'; '.join(texts)}; all agreed at step {agreed}; {kept}; if it "
        "happens again on that rank, take its device or machine out"
    )


def _replicated_tensors(training: TrainingModel) -> Iterator[_Replicated]:
    """Yield the weights, and what optimizers that do not shard it keep of each, in the same order on all ranks."""
    states: dict[int, dict[str, Any]] = {}
    for part in getattr(training.optimizer, "chained_optimizers", [training.optimizer]):
        if not hasattr(part, "model_param_group_index_map") and not getattr(part, "is_stub_optimizer", False):
            states.update({id(weight): state for weight, state in part.optimizer.state.items()})
    weights = [
        (name_in_whole_model(name, part), weight)
        for part in training.models
        for name, weight in part.named_parameters()
    ]
    for name, weight in weights:
        is_expert = not getattr(weight, "allreduce", True)
        yield _Replicated(f"the weight {name}", weight, is_expert)
        main = getattr(weight, "main_param", None)
        if main is not None and id(main) in states:
            yield _Replicated(f"the fp32 weight {name}", main, is_expert)
        state = states.get(id(weight if main is None else main), {})
        for key in sorted(key for key, value in state.items() if isinstance(value, Tensor)):
            yield _Replicated(f"Adam's {key} of {name}", state[key], is_expert)


def _gather(values: np.ndarray, world: World) -> np.ndarray:
    """Return the values of all ranks, int64 [ranks, values]."""
    own = torch.from_numpy(np.ascontiguousarray(values, np.int64))
    rows = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(rows, own)
    return torch.stack(rows).numpy()
