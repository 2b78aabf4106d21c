"""Latents of DeepSeek-V3's attention layers, for plans in which these travel instead of keys and values.

The layers of transformers compress the keys and values of a token, rotate the shared channels, and expand both in a
method of its own, `expand_kv`, before they call the attention implementation. Where the plan lets latents travel, that
method returns the shared channels and the latents as they are, and readers apply the weight of `kv_b_proj`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.expansion import EXPANSION, LATENT_MODELS, has_separate_expansion
from mindspeed_cp.integrations.huggingface.plans import RankPlans


def keep_latents() -> None:
    """Let attention layers keep their latents where the plan of a call lets these travel; done once."""
    for model_type, name in LATENT_MODELS.items():
        if not has_separate_expansion(model_type):
            continue
        layer = getattr(import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name)
        if not getattr(layer.forward, "keeps_latents", False):
            layer.forward = _keeping(layer.forward)


def _keeping(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of an attention layer that expands nothing where latents travel."""

    @wraps(forward)
    def run(self: Any, *arguments: Any, **others: Any) -> Any:
        if not latents_travel(self, others.get("plan")):
            return forward(self, *arguments, **others)
        setattr(self, EXPANSION, _unexpanded)
        try:
            return forward(self, *arguments, **others)
        finally:
            delattr(self, EXPANSION)

    run.keeps_latents = True  # type: ignore[attr-defined]
    return run


def _unexpanded(latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    return shared, latent


@torch.compiler.disable(reason="plans are no tensors")
def latents_travel(layer: Any, plan: object) -> bool:
    """Return True if latents travel in the plan of a layer's call."""
    index = getattr(layer, "layer_idx", None)
    if not isinstance(plan, RankPlans) or index is None:
        return False
    return plan.plans.of_layer(index).attention.latent is not None


def up_projection(label: str, layer: Any) -> Tensor:
    """Return the weight by which readers expand the latents of a layer.

    Raises:
        ConfigError: the up-projection is more than a weight, such as one with an adapter, quantized or sharded by
            itself.
    """
    module = layer.kv_b_proj
    hooks = getattr(module, "_forward_hooks", None) or getattr(module, "_forward_pre_hooks", None)
    if type(module) is not nn.Linear or module.bias is not None or hooks or type(module.weight) is not nn.Parameter:
        kind = f"{type(module).__name__} with {'hooks' if hooks else 'a ' + type(module.weight).__name__}"
        raise ConfigError(
            f"{label}: latents travel in this plan, but kv_b_proj is a {kind}; valid: a torch.nn.Linear without bias, "
            "adapter or hooks, sharded only together with its layer, or plans with latents='off'"
        )
    return module.weight
