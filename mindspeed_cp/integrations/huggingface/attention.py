"""register: makes planned attention an attention implementation of transformers; and the function of all layers, which
compares what the model asks for with the plan, and runs the plan.

The layers of DeepSeek-V3 compress the keys and values of a token, rotate the shared channels, and expand both in a
method of its own, `expand_kv`, before they call the attention implementation. Where the plan lets latents travel, that
method returns the shared channels and the latents as they are, and readers apply the weight of `kv_b_proj`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mindspeed_cp.engine import AttentionCheck, context_parallel_attention
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.families import IMPLEMENTATION, latent_layer, window_of_side
from mindspeed_cp.integrations.huggingface.heads import check_calls
from mindspeed_cp.integrations.huggingface.masks import ModelMask, check_mask, planned_mask
from mindspeed_cp.integrations.huggingface.plans import RankPlans
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.schema.numbers import check_count

Function = TypeVar("Function", bound=Callable[..., Any])


def register(check_attention: int | None = None) -> str:
    """Register planned attention with transformers, as ``attn_implementation="mindspeed_cp"``; may be called again.

    DeepSeek-V3's layers are wrapped, so that they pass on latents where the plan lets these travel. Calls of models
    with a plan are checked for heads that read other rows than their own.

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
    layer = latent_layer("deepseek_v3")
    if layer is not None and not getattr(layer.forward, "keeps_latents", False):
        layer.forward = _keeping(layer.forward)
    check_calls(PreTrainedModel)
    return IMPLEMENTATION


def _keeping(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of an attention layer that expands nothing where latents travel."""

    @wraps(forward)
    def run(self: Any, *arguments: Any, **others: Any) -> Any:
        if not latents_travel(self, others.get("plan")):
            return forward(self, *arguments, **others)
        self.expand_kv = lambda latent, shared: (shared, latent)
        try:
            return forward(self, *arguments, **others)
        finally:
            del self.expand_kv

    run.keeps_latents = True  # type: ignore[attr-defined]
    return run


def not_compiled(reason: str) -> Callable[[Function], Function]:
    """Return a decorator for functions that torch.compile calls as they are; torch 2.7 takes no reason."""
    takes_reason = "reason" in signature(torch.compiler.disable).parameters
    decorator: Callable[[Function], Function] = torch.compiler.disable(**({"reason": reason} if takes_reason else {}))
    return decorator


@not_compiled("plans are no tensors")
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


#: Arguments that change attention in a way that no plan has: each must be None or False.
UNSUPPORTED = {
    "softcap": "planned attention does not cap scores",
    "position_bias": "planned attention has no bias but ALiBi",
    "cache": "planned attention is for training",
    "output_attentions": "the weights exist on no rank",
    "head_mask": "planned attention masks no heads",
}


class BatchChecks:
    """The comparisons of this process's attention with the fp64 reference: in every `every`-th batch that is trained
    on, in one layer; 0: none."""

    def __init__(self) -> None:
        self.every = self._batches = 0
        self._checks: WeakKeyDictionary[RankPlans, AttentionCheck | None] = WeakKeyDictionary()

    def of_layer(self, plan: RankPlans, layer: int) -> AttentionCheck | None:
        """Return what observes this call of a layer, numbered from 0; the same on all ranks, whose batches are the
        same."""
        if not self.every:
            return None
        if plan not in self._checks:
            self._batches += 1
            seed, layers = (self._batches,), len(plan.plans.attentions)
            due = self._batches % self.every == 0
            self._checks[plan] = AttentionCheck(layers, seed, plan.timeout) if due else None
        check = self._checks[plan]
        return None if check is None or check.layer != layer + 1 else check


#: Of this process, as is transformers' table of attention implementations; :func:`register` sets the interval.
BATCH_CHECKS = BatchChecks()


@not_compiled("a plan's messages are no graph; everything around attention is compiled")
def planned_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Tensor | None = None,
    *,
    plan: RankPlans | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer; the function that models call under attn_implementation "mindspeed_cp".

    Args:
        module: the attention layer, with its `layer_idx`.
        query: [1, heads, rows, dim] of this rank.
        key, value: [1, kv_heads, rows, dim]. Where latents travel in the plan, the channels that all heads share, and
            the latents, [1, 1, rows, channels] each.
        attention_mask: what :func:`planned_mask` returned to the model.
        plan: the model's argument ``plan``, from :func:`planned_batch`.
        dropout, scaling, sliding_window, is_causal, others: what the model asks for; compared with the plan.
        s_aux: sinks of the layer's heads, [heads].

    Returns:
        [1, rows, heads, dim_v], and None for the weights.

    Raises:
        ConfigError: there is no plan, or the model asks for something that the plan does not have.
    """
    layer = getattr(module, "layer_idx", None)
    label = f"layer {layer} ({type(module).__name__})"
    if not isinstance(plan, RankPlans):
        kind = "plan is None" if plan is None else f"plan is a {type(plan).__name__}"
        raise ConfigError(
            f"{label}: {kind}; valid: model(**rows) with the rows of planned_batch; for generation and "
            'other steps without plans model.set_attn_implementation("sdpa") ("eager" for gpt_oss)'
        )
    if layer is None:
        raise ConfigError(f"{label} has no layer_idx; valid: models that number their layers")
    layer_plan = plan.plans.of_layer(layer)
    wanted = layer_plan.attention
    for name, why in UNSUPPORTED.items():
        given = others.get(name)
        if given is not None and given is not False:
            text = "a tensor" if isinstance(given, Tensor) else repr(given)
            raise ConfigError(f"{label}: {name} is {text}, but {why}; valid: None")
    if (s_aux is not None) != plan.plans.has_sinks:
        given, planned = ("None", "with sinks") if s_aux is None else ("a tensor", "without sinks")
        raise ConfigError(
            f"{label}: s_aux is {given}, but the plan is for layers {planned}; valid: the model as it was when the "
            "plans were built"
        )
    _check_settings(label, module, wanted, dropout, scaling, sliding_window, is_causal)
    if not isinstance(attention_mask, ModelMask):
        text = "None" if attention_mask is None else f"a {type(attention_mask).__name__}"
        raise ConfigError(
            f"{label}: attention_mask is {text}, so that what the model lets tokens see cannot be compared with the "
            "plan; valid: no attention_mask in the batch, and a model that builds its mask by transformers' "
            "create_causal_mask and the like"
        )
    check_mask(label, attention_mask, plan, layer_plan)
    _check_shapes(label, query, key, value, wanted, plan)
    device = query.device.type
    # Under autocast rotary positions leave q and k in fp32; attention is one of the operators in its lower precision.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    q, k, v = (x[0, :, : plan.rows].transpose(0, 1).to(dtype or x.dtype) for x in (query, key, value))
    sink = None if s_aux is None else s_aux.float()
    kv_up = None if wanted.latent is None else up_projection(label, module).to(q.dtype)
    dropout_key = None if plan.dropout_seed is None else (plan.dropout_seed, layer)
    out = context_parallel_attention(
        q,
        k,
        v,
        layer_plan,
        group=plan.group,
        backend=plan.backend,
        timeout=plan.timeout,
        dropout_key=dropout_key,
        training=module.training,
        batch_digest=plan.batch_digest,
        sink=sink,
        kv_up=kv_up,
    )
    check = BATCH_CHECKS.of_layer(plan, layer) if module.training else None
    if check is not None:
        check.observe(q, k, v, out, layer_plan, plan.rank, dropout_key if wanted.dropout else None, sink, kv_up)
        check.compare_in_backward(q, plan.group)
    return plan.padded(out)[None], None


def _check_settings(
    label: str,
    module: Any,
    wanted: AttentionConfig,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    is_causal: bool | None,
) -> None:
    """Raise ConfigError if a setting of the call differs from the plan's."""
    window = None if sliding_window is None else window_of_side(sliding_window, wanted.mask)
    scale = wanted.head_dim**-0.5 if scaling is None else float(scaling)
    rate = wanted.dropout if module.training else 0.0
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if getattr(getattr(module, "config", None), "is_causal", True) is False:
        causal = False
    for name, value, planned, is_planned in (
        ("sliding_window", sliding_window, f"window {wanted.window}", window == wanted.window),
        ("scaling", scale, f"scale {wanted.softmax_scale}", math.isclose(scale, wanted.softmax_scale, rel_tol=1e-6)),
        ("dropout", dropout, f"dropout {rate}", math.isclose(dropout, rate, abs_tol=1e-9)),
        ("is_causal", causal, f"mask {wanted.mask!r}", causal is None or bool(causal) == (wanted.mask == "causal")),
    ):
        if not is_planned:
            raise ConfigError(
                f"{label}: {name} is {value!r}, but the plan has {planned}; valid: plans built for this model's "
                "configuration as it is now, build_plans(model.config, ...)"
            )


def _check_shapes(
    label: str, query: Tensor, key: Tensor, value: Tensor, wanted: AttentionConfig, plan: RankPlans
) -> None:
    """Raise ConfigError if heads, channels or rows of a call differ from the plan's."""
    shapes = {
        "query": (1, wanted.heads, plan.padded_rows, wanted.head_dim),
        "key": (1, wanted.kv_row.heads, plan.padded_rows, wanted.kv_row.dim),
        "value": (1, wanted.kv_row.heads, plan.padded_rows, wanted.kv_row.dim_v),
    }
    for (name, shape), x in zip(shapes.items(), (query, key, value), strict=True):
        if tuple(x.shape) != shape:
            raise ConfigError(
                f"{label}: {name} has shape {list(x.shape)}, [batch, heads, rows, channels]; the plan gives rank "
                f"{plan.rank} {list(shape)}; valid: the rows of planned_batch, use_cache=False"
            )
