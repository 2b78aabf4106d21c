"""register: makes planned attention an attention implementation of transformers."""

from __future__ import annotations

from typing import Any

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.alibi_models import ALIBI_MODELS, current_plan, replace_alibi_attention
from mindspeed_cp.integrations.huggingface.attention import BATCH_CHECKS, planned_attention
from mindspeed_cp.integrations.huggingface.families import IMPLEMENTATION
from mindspeed_cp.integrations.huggingface.heads import check_calls
from mindspeed_cp.integrations.huggingface.latent_models import keep_latents
from mindspeed_cp.integrations.huggingface.masks import ModelMask
from mindspeed_cp.schema.numbers import check_count


def register(check_attention: int | None = None) -> str:
    """Register planned attention with transformers, as ``attn_implementation="mindspeed_cp"``; may be called again.

    BLOOM and MPT do not call an attention implementation by name, so their attention layers are replaced in the modules
    of transformers; with another implementation they compute as before. DeepSeek-V3's layers are wrapped, so that they
    pass on latents where the plan lets these travel. Calls of models with a plan are checked for heads that read other
    rows than their own.

    Args:
        check_attention: compare some rows of one layer's attention with an fp64 reference in every so many batches that
            the model trains on (:mod:`mindspeed_cp.engine.attention_check`); 0: never; None: no change, at first never.
            The comparison runs in the backward: CorruptionError, which names layer, rank and rows, comes out of it
            before any weight changes.

    Returns:
        The name of the implementation.

    Raises:
        ConfigError: transformers is missing or older than 5, or check_attention is no number of batches.
    """
    if check_attention is not None:
        check_count("check_attention", check_attention, least=0, what="a number of batches")
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as error:
        raise ConfigError(f"transformers cannot be imported ({error}); valid: transformers 5 or later") from None
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(f"transformers is {transformers.__version__}; valid: 5 or later")
    if check_attention is not None:
        BATCH_CHECKS.every = check_attention
    AttentionInterface.register(IMPLEMENTATION, planned_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, planned_mask)
    replace_alibi_attention(IMPLEMENTATION)
    keep_latents()
    check_calls(PreTrainedModel)
    return IMPLEMENTATION


def planned_mask(*, mask_function: Any, attention_mask: Any = None, **others: Any) -> ModelMask:
    """Return what a model passes to its layers as attention_mask: the function that says what is visible.

    Raises:
        ConfigError: the batch has an attention_mask, which says that it has padding.
    """
    if attention_mask is not None:
        raise ConfigError(
            "attention_mask was given to a model with planned attention; valid: none; shard_batch leaves padding out, "
            "and the plan's documents say what is visible; for generation and other steps without plans "
            'model.set_attn_implementation("sdpa") ("eager" for gpt_oss)'
        )
    model_type = getattr(others.get("config"), "model_type", None)
    return ModelMask(mask_function, current_plan() if model_type in ALIBI_MODELS else None)
