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

from mindspeed_cp.config.sections import TrainSettings


def prepare_to_load(optimizer: Any) -> None:
    """Give torch's Adam a state of zeros to load into, if it has none."""
    for part in _parts(optimizer):
        for weight, state in _weights(part):
            if not state:
                part.optimizer.state[weight] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }


def load(optimizer: Any, state: Any) -> None:
    """Call optimizer.load_state_dict(state), also for the distributed optimizer."""
    for part, part_state in zip(_parts(optimizer), _states(optimizer, state), strict=True):
        _keep_own_weights(part, part_state)
    distributed = [part for part in _parts(optimizer) if hasattr(part, "model_param_group_index_map")]
    for part in distributed:
        part._set_main_param_and_optimizer_states = _LoadAdamState(part)
    with torch.no_grad():
        optimizer.load_state_dict(state)
    for part in distributed:
        del part._set_main_param_and_optimizer_states
        for _, weight_state in _weights(part):
            weight_state["step"] = weight_state["step"].clone()


def _states(optimizer: Any, state: Any) -> list[Any]:
    """Return the state of each of `_parts`; Megatron leaves out the list where there is one."""
    count = len(_parts(optimizer))
    return [state] if count == 1 else [state[number] for number in range(count)]


def _keep_own_weights(part: Any, state: Any) -> None:
    """Number the weights of a loaded state as this rank does. What is no tensor is the first rank's in a checkpoint,
    whose pipeline stage may have another number of weights."""
    inner = state.get("optimizer", state)
    if hasattr(part, "model_param_group_index_map") or "param_groups" not in inner:  # Megatron does it for these
        return
    own = part.optimizer.state_dict()["param_groups"]
    for group, own_group in zip(inner["param_groups"], own, strict=True):
        group["params"] = own_group["params"]
    numbers = {number for group in own for number in group["params"]}
    inner["state"] = {key: value for key, value in inner["state"].items() if key in numbers or isinstance(key, str)}


def set_fused(optimizer: Any, fused: bool) -> None:
    """Let torch's AdamW update by its fused operator, or by single ones; counters of steps lie where that needs them.

    A checkpoint's own choice and place are undone: either way writes what the other loads.
    """
    for adam in torch_optimizers(optimizer):
        for group in adam.param_groups:
            group["fused"] = fused or None
        for weight, state in adam.state.items():
            if "step" in state:
                state["step"] = state["step"].to(weight.device if fused else "cpu", torch.float32)


def move_steps_to_host(state: dict[Any, Any]) -> None:
    """Move the common counter of steps in a state of Megatron's optimizer to the host.

    It is saved as it is, wherever torch's Adam has it, and a machine without that device must load it.
    """
    for key, value in state.items():
        if isinstance(value, dict):
            move_steps_to_host(value)
        elif key == "common_step" and isinstance(value, Tensor):
            state[key] = value.cpu()


def set_rates(optimizer: Any, train: TrainSettings) -> None:
    """Set the rates of a loaded optimizer to those of the settings; learning rate and weight decay follow with the next
    step of the schedule."""
    for group in optimizer.param_groups:
        group.update(betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_eps)
        group.update({key: value for key, value in (("max_lr", train.lr), ("min_lr", train.min_lr)) if key in group})


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


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers inside of Megatron's."""
    return [part.optimizer for part in _parts(optimizer)]


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _weights(part: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield the weights of torch's optimizer with their states."""
    for group in part.optimizer.param_groups:
        for weight in group["params"]:
            yield weight, part.optimizer.state[weight]
