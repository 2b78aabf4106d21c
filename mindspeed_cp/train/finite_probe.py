"""Which layer gave the first value that is not finite: sums of what layers compute, looked at only after a bad step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_cp.schema.messages import name_ranks
from mindspeed_cp.train.world import World


class FiniteProbe:
    """Hooks on a GPT that keep a sum of each output, and of each gradient of an input, in the order of computation.

    A sum that is not finite shows a value that is not (or an overflow of the sum, which matters only beside a bad
    loss). Nothing is read from the device until `first_bad`.

    Args:
        gpt: Megatron's GPTModel.
    """

    def __init__(self, gpt: nn.Module) -> None:
        self._names: list[str] = []
        self._sums: list[Tensor] = []
        for name, module in gpt.named_modules():
            parent, _, last = name.rpartition(".")
            if name == "embedding" or parent.endswith("layers"):
                module.register_forward_hook(self._after(f"the output of {name}"))
                module.register_forward_pre_hook(self._before(f"the gradient that {name} gives"), with_kwargs=True)
            elif last == "core_attention":
                module.register_forward_pre_hook(self._inputs(f"the q, k or v of {parent}"))
                module.register_forward_hook(
                    self._after(f"the output of {name}", f"the gradient at the output of {name}")
                )

    def reset(self) -> None:
        """Forget what was seen: a step begins."""
        self._names.clear()
        self._sums.clear()

    def first_bad(self, world: World) -> str | None:
        """Return which value of a step was the first that is not finite, and on which rank; None if none was seen.

        Every rank must call it.
        """
        own: tuple[int, str] | None = None
        if self._sums:
            finite = torch.stack(self._sums).isfinite().tolist()
            own = next(((index, self._names[index]) for index, good in enumerate(finite) if not good), None)
        ranks = {rank: value for rank, value in enumerate(world.gather_json(own)) if value is not None}
        if not ranks:
            return None
        first = min(ranks.values(), key=lambda value: value[0])
        where = [rank for rank, value in ranks.items() if value == first]
        return f"{first[1]} on {name_ranks(where)}"

    def _keep(self, name: str, value: Tensor) -> None:
        self._names.append(name)
        self._sums.append(value.detach().sum(dtype=torch.float32))

    def _after(self, name: str, gradient_name: str | None = None) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if not isinstance(output, Tensor):
                return
            self._keep(name, output)
            if gradient_name is not None and output.requires_grad:
                output.register_hook(lambda gradient: self._keep(gradient_name, gradient))

        return hook

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            value = arguments[0] if arguments else keywords.get("hidden_states")
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: self._keep(name, gradient))

        return hook

    def _inputs(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            for value in arguments[:3]:
                if isinstance(value, Tensor):
                    self._keep(name, value)

        return hook


def gradient_norm(ddp_model: nn.Module) -> float:
    """Return the norm of this rank's gradients after the reduction, which shows whether one is not finite."""
    buffers = [*ddp_model.buffers, *ddp_model.expert_parallel_buffers]  # type: ignore[misc]
    norms = [torch.linalg.vector_norm(buffer.grad_data) for buffer in buffers]
    return float(torch.stack(norms).sum())


def nonfinite_ranks(values: Tensor, name: str) -> str | None:
    """Return which of the ranks' values are not finite, or None."""
    bad = [rank for rank, value in enumerate(values.tolist()) if not math.isfinite(value)]
    if not bad:
        return None
    kind = "NaN" if values.isnan().any() else "infinite"
    return f"{name} is {kind} on {name_ranks(bad)} of {len(values)}"
