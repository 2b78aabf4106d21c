"""The choice of fused operators on the CPU, and torch's AdamW between fused and single operators."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_cp.config import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.fused import OPERATORS, missing_operators
from mindspeed_cp.train import optimizer_state
from mindspeed_cp.train.fused_operators import FusedOperators, choose_fused_operators

RATES = dict(lr=0.03, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def test_fused_operators_true_needs_an_npu() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(train={"device": "cpu", "fused_operators": True})  # type: ignore[arg-type]
    assert str(caught.value) == (
        "train.fused_operators = true: needs NPUs, and train.device is cpu; use auto or false, or train.device: npu"
    )
    with pytest.raises(ConfigError, match='fused_operators = "yes": must be one of auto, true, false'):
        Settings(train={"fused_operators": "yes"})  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["auto", False])
def test_nothing_is_fused_on_the_cpu(setting: Any) -> None:
    settings = Settings(train={"device": "cpu", "fused_operators": setting})  # type: ignore[arg-type]
    chosen = choose_fused_operators(settings, torch.device("cpu"))
    assert chosen == FusedOperators() and chosen.note() is None
    config = SimpleNamespace(bias_activation_fusion=False)
    chosen.use_in_config(config)
    assert config.bias_activation_fusion is False


def test_without_torch_npu_all_are_missing() -> None:
    """As the dispatcher tells; a kernel of the CPU is none for an NPU."""
    assert missing_operators().keys() == OPERATORS.keys()


class Optimizer:
    """As Megatron's: torch's AdamW, with a state of its own making."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        self.optimizer = torch.optim.AdamW(weights, **RATES)  # type: ignore[arg-type]


def make(values: list[torch.Tensor]) -> Optimizer:
    return Optimizer([torch.nn.Parameter(x.clone()) for x in values])


def steps(optimizer: Optimizer, gradients: list[list[torch.Tensor]]) -> None:
    for gradient in gradients:
        for weight, g in zip(optimizer.optimizer.param_groups[0]["params"], gradient, strict=True):
            weight.grad = g.clone()
        optimizer.optimizer.step()


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_each_kind_goes_on_from_the_others_state(order: tuple[bool, bool]) -> None:
    """On the CPU, where torch has a fused AdamW of its own: what a checkpoint says of the kind does not count."""
    start = [torch.randn(37, 5), torch.randn(11)]
    gradients = [[torch.randn_like(x) for x in start] for _ in range(6)]
    reference = make(start)
    steps(reference, gradients)
    first = make(start)
    optimizer_state.set_fused(first, order[0])
    assert not first.optimizer.state  # nothing is made before the first step
    steps(first, gradients[:3])
    second = make([weight.detach() for weight in first.optimizer.param_groups[0]["params"]])
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    assert second.optimizer.param_groups[0]["fused"] == (True if order[0] else None)
    optimizer_state.set_fused(second, order[1])
    assert second.optimizer.param_groups[0]["fused"] == (True if order[1] else None)
    steps(second, gradients[3:])
    for ours, theirs in zip(*(x.optimizer.param_groups[0]["params"] for x in (second, reference)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert float(second.optimizer.state[ours]["step"]) == 6


def test_counters_of_steps_lie_where_the_weights_are_or_on_the_host() -> None:
    """A fused AdamW wants them beside the weights, whatever device that is; a single one reads them on the host."""
    weight = torch.nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = Optimizer([weight])
    optimizer.optimizer.state[weight] = {"step": torch.tensor(4.0, dtype=torch.float64)}
    optimizer_state.set_fused(optimizer, True)
    step = optimizer.optimizer.state[weight]["step"]
    assert step.device.type == "meta" and step.dtype == torch.float32
