"""Which layer gave the first value that is not finite: sums of what layers compute, looked at only after a bad step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_cp.schema.messages import name_ranks
from mindspeed_cp.train.stages import name_in_whole_model
from mindspeed_cp.train.world import World


@dataclass(frozen=True)
class _Place:
    """Where a value is computed.

    Attributes:
        is_gradient: it is a gradient.
        stage: virtual pipeline stage, counted over all ranks in the order of the forward.
        name: what it is.
    """

    is_gradient: bool
    stage: int
    name: str

    @property
    def order(self) -> list[int]:
        """Sorts places as values that are not finite spread over stages: forward, then backward from the last one."""
        return [int(self.is_gradient), -self.stage if self.is_gradient else self.stage]


class FiniteProbe:
    """Hooks on a GPT that keep a sum of each output, and of each gradient of an input, in the order of computation.

    A sum that is not finite shows a value that is not (or an overflow of the sum, which matters only beside a bad
    loss). Nothing is read from the device until `first_bad`.

    Args:
        models: Megatron's GPTModels, one for each virtual pipeline stage of this rank.
        world: this rank among all.
    """

    def __init__(self, models: Sequence[nn.Module], world: World) -> None:
        self._places: list[_Place] = []
        self._sums: list[Tensor] = []
        for number, model in enumerate(models):
            self._watch(model, number * world.stages + world.stage)

    def _watch(self, model: nn.Module, stage: int) -> None:
        """Put hooks on the model of a virtual stage."""
        for local_name, module in model.named_modules():
            name = name_in_whole_model(local_name, model)
            parent, _, last = name.rpartition(".")
            if name == "embedding" or parent.endswith("layers"):
                module.register_forward_hook(self._after(_Place(False, stage, f"the output of {name}")))
                before = self._before(_Place(True, stage, f"the gradient that {name} gives"))
                module.register_forward_pre_hook(before, with_kwargs=True)
            elif last == "core_attention":
                module.register_forward_pre_hook(self._inputs(_Place(False, stage, f"the q, k or v of {parent}")))
                module.register_forward_hook(
                    self._after(
                        _Place(False, stage, f"the output of {name}"),
                        _Place(True, stage, f"the gradient at the output of {name}"),
                    )
                )

    def reset(self) -> None:
        """Forget what was seen: a step begins."""
        self._places.clear()
        self._sums.clear()

    def first_bad(self, world: World) -> str | None:
        """Return which value of a step was the first that is not finite, and on which rank; None if none was seen.

        Every rank must call it.
        """
        own: list[Any] | None = None
        if self._sums:
            finite = torch.stack(self._sums).isfinite().tolist()
            bad = [(index, place) for index, place in enumerate(self._places) if not finite[index]]
            if bad:  # of several stages, all see what spreads from one; of a single stage, the order is that of time
                index, place = min(bad, key=lambda x: x[1].order) if world.stages > 1 else bad[0]
                own = [place.order if world.stages > 1 else [], index, place.name]
        ranks = {rank: value for rank, value in enumerate(world.gather_json(own)) if value is not None}
        if not ranks:
            return None
        first = min(ranks.values(), key=lambda value: value[:2])
        where = [rank for rank, value in ranks.items() if value == first]
        return f"{first[2]} on {name_ranks(where)}"

    def _keep(self, place: _Place, value: Tensor) -> None:
        self._places.append(place)
        self._sums.append(value.detach().sum(dtype=torch.float32))

    def _after(self, place: _Place, gradient: _Place | None = None) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if not isinstance(output, Tensor):
                return
            self._keep(place, output)
            if gradient is not None and output.requires_grad:
                output.register_hook(lambda value: self._keep(gradient, value))

        return hook

    def _before(self, place: _Place) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            value = arguments[0] if arguments else keywords.get("hidden_states")
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: self._keep(place, gradient))

        return hook

    def _inputs(self, place: _Place) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            for value in arguments[:3]:
                if isinstance(value, Tensor):
                    self._keep(place, value)

        return hook


def gradient_norm(ddp_models: Sequence[nn.Module]) -> float:
    """Return the norm of this rank's gradients after the reduction, which shows whether one is not finite."""
    buffers = [x for model in ddp_models for x in (*model.buffers, *model.expert_parallel_buffers)]  # type: ignore[misc]
    norms = [torch.linalg.vector_norm(buffer.grad_data) for buffer in buffers]
    return float(torch.stack(norms).sum())


def nonfinite_ranks(values: Tensor, name: str) -> str | None:
    """Return which of the ranks' values are not finite, or None."""
    bad = [rank for rank, value in enumerate(values.tolist()) if not math.isfinite(value)]
    if not bad:
        return None
    kind = "NaN" if values.isnan().any() else "infinite"
    return f"{name} is {kind} on {name_ranks(bad)} of {len(values)}"
