"""register: makes planned attention an attention implementation of transformers.

The layers of BLOOM and MPT compute attention themselves and pass no keyword arguments on, so they are replaced. A model
hands what the mask function returns to all its layers, also when they are recomputed for activation checkpointing: here
that carries the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.attention import BATCH_CHECKS, keep_latents, planned_attention
from mindspeed_cp.integrations.huggingface.families import IMPLEMENTATION
from mindspeed_cp.integrations.huggingface.heads import check_calls
from mindspeed_cp.integrations.huggingface.masks import ModelMask
from mindspeed_cp.integrations.huggingface.plans import RankPlans
from mindspeed_cp.schema.numbers import check_count

#: model_type -> beginning of the names of its classes.
ALIBI_MODELS = {"bloom": "Bloom", "mpt": "Mpt"}

_current_plan: ContextVar[RankPlans | None] = ContextVar("_current_plan", default=None)


def current_plan() -> RankPlans | None:
    """Return the plans of the model that runs; None for models that pass them on themselves."""
    return _current_plan.get()


def replace_alibi_attention(implementation: str) -> None:
    """Replace the forward of BLOOM's and MPT's models and attention layers; done once.

    Args:
        implementation: name of planned attention; models with another one compute as before.
    """
    for name, prefix in ALIBI_MODELS.items():
        module = import_module(f"transformers.models.{name}.modeling_{name}")
        attention = getattr(module, f"{prefix}Attention")
        if getattr(attention.forward, "is_planned", False):
            continue
        base = getattr(module, f"{prefix}PreTrainedModel")
        models = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, base)]
        for model in models:
            if "forward" in vars(model):
                setattr(model, "forward", _with_plan(getattr(model, "forward"), implementation))  # noqa: B009, B010
        attention.forward = _planned(attention.forward, _bloom_forward if name == "bloom" else _mpt_forward)


def _with_plan(forward: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """Return the forward of a model that takes the argument ``plan`` for its layers."""

    @wraps(forward)
    def run(self: Any, *arguments: Any, plan: RankPlans | None = None, **others: Any) -> Any:
        if self.config._attn_implementation != implementation:
            return forward(self, *arguments, **others)
        plan = _current_plan.get() if plan is None else plan
        if not isinstance(plan, RankPlans):
            raise ConfigError(
                f"{type(self).__name__}: plan is {plan!r}; valid: model(**batch) with the batch of shard_batch"
            )
        token = _current_plan.set(plan)
        try:
            return forward(self, *arguments, **others)
        finally:
            _current_plan.reset(token)

    return run


def _planned(forward: Callable[..., Any], planned: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of an attention layer that runs the plan that its mask carries."""

    @wraps(forward)
    def run(self: Any, *arguments: Any, attention_mask: Any = None, **others: Any) -> Any:
        if not isinstance(attention_mask, ModelMask):
            return forward(self, *arguments, attention_mask=attention_mask, **others)
        return planned(self, *arguments, mask=attention_mask, **others)

    run.is_planned = True  # type: ignore[attr-defined]
    return run


def _bloom_forward(
    self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, *, mask: ModelMask, **others: Any
) -> tuple[Tensor, None]:
    """Run a layer of BLOOM, whose projection has q, k and v of each head side by side."""
    q, k, v = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
    rate = self.attention_dropout.p if self.training else 0.0
    out = _run(self, (q, k, v), mask, self.inv_norm_factor, rate, others)
    return residual + F.dropout(self.dense(out), p=self.hidden_dropout, training=self.training), None


def _mpt_forward(
    self: Any, hidden_states: Tensor, position_bias: Tensor, *, mask: ModelMask, **others: Any
) -> tuple[Tensor, None]:
    """Run a layer of MPT."""
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    projected = tuple(x.unflatten(-1, (self.n_heads, self.head_dim)) for x in qkv.chunk(3, dim=-1))
    rate = self.attn_dropout_p if self.training else 0.0
    return self.out_proj(_run(self, projected, mask, self.softmax_scale, rate, others)), None


def _run(
    layer: Any, qkv: tuple[Tensor, ...], mask: ModelMask, scale: float, rate: float, others: dict[str, Any]
) -> Tensor:
    """Run planned attention on [1, rows, heads, dim]; returns [1, rows, heads * dim]."""
    if others.get("layer_past") is not None or others.get("past_key_values") is not None:
        raise ConfigError("use_cache is True; valid with planned attention: use_cache=False, as shard_batch sets it")
    q, k, v = (x.transpose(1, 2) for x in qkv)
    output_attentions = others.get("output_attentions")
    out, _ = planned_attention(
        layer, q, k, v, mask,
        plan=mask.plan, dropout=rate, scaling=scale, is_causal=True, output_attentions=output_attentions,
    )  # fmt: skip
    return out.flatten(2)


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
