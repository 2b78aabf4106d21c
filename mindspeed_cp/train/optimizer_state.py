"""Loading the state of Megatron's optimizers where their inner optimizer is torch's Adam.

Megatron expects the fused Adam of Apex or Transformer Engine, which counts steps for a group of weights; torch's counts
them for each weight.  Its plain optimizers take care of that.  Its distributed optimizer (0.16.1) can save but not load
such a state: it asks an optimizer that has not stepped for its step, it looks for each weight's step among the loaded
tensors, and it gives all weights one and the same counter, which every weight then advances.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def prepare_to_load(optimizer: Any) -> None:
    """Give torch's Adam a state of zeros to load into, if it has none."""
    for part in _parts(optimizer):
        for weight, state in _weights(part):
            if not state:
                part.optimizer.state[weight] = {
                    "step": torch.tensor(1.0),  # Megatron drops that of an optimizer at 0
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }


def load(optimizer: Any, state: Any, steps: float) -> None:
    """Call optimizer.load_state_dict(state), also for the distributed optimizer, and set Adam's counters of steps."""
    distributed = [part for part in _parts(optimizer) if hasattr(part, "model_param_group_index_map")]
    for part in distributed:
        part._set_main_param_and_optimizer_states = _LoadAdamState(part)
    with torch.no_grad():
        optimizer.load_state_dict(state)
    for part in distributed:
        del part._set_main_param_and_optimizer_states
    for part in _parts(optimizer):
        for _, weight_state in _weights(part):
            weight_state["step"] = torch.tensor(float(steps))


def steps_of(optimizer: Any) -> float:
    """Return the number of updates that Adam has made, which every weight counts alike."""
    return max((float(state["step"]) for part in _parts(optimizer) for _, state in _weights(part)), default=0.0)


class _LoadAdamState:
    """Replacement of DistributedOptimizer._set_main_param_and_optimizer_states while a state is loaded."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __call__(self, model_param: nn.Parameter, tensors: Mapping[str, Tensor]) -> None:
        group, order = self._part.model_param_group_index_map[model_param]
        main = self._part.optimizer.param_groups[group]["params"][order]
        for key, target in {"param": main, **self._part.optimizer.state[main]}.items():
            if key != "step":
                target.copy_(tensors[key])


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _weights(part: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield the weights of torch's optimizer with their states."""
    for group in part.optimizer.param_groups:
        for weight in group["params"]:
            yield weight, part.optimizer.state[weight]
