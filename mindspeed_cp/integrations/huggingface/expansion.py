"""True where the installed transformers expands latents in a method of its own, which can be left out."""

from __future__ import annotations

from functools import cache
from importlib import import_module

#: model_type -> name of the class of its attention layers.
LATENT_MODELS = {"deepseek_v3": "DeepseekV3Attention"}

#: Name of that method.
EXPANSION = "expand_kv"


@cache
def has_separate_expansion(model_type: str) -> bool:
    """Return True if the installed transformers expands the latents of a model in a method of its own."""
    if model_type not in LATENT_MODELS:
        return False
    try:
        module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    except ImportError:
        return False
    return hasattr(getattr(module, LATENT_MODELS[model_type]), EXPANSION)
