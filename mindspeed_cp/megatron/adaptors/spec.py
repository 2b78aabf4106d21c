"""install: put planned attention into a Megatron spec."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module

from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.core_attention import PlannedAttention
from mindspeed_cp.megatron.adaptors.latent import PlannedMLASelfAttention
from mindspeed_cp.megatron.adaptors.router import PlannedRouter
from mindspeed_cp.megatron.mindspeed_compat import check_mindspeed

SpecT = TypeVar("SpecT")


#: Packages whose classes named ...DotProductAttention compute what a TransformerConfig says, and nothing else.
_KNOWN_PACKAGES = ("megatron", "mindspeed", "mindspeed_llm")


def install(
    spec: SpecT,
    suite: SuiteSettings,
    *,
    alibi: bool = False,
    packed_cut: str = "document",
    replaces: Sequence[type] = (),
) -> SpecT:
    """Return a copy of a spec with :class:`PlannedAttention` as core attention and :class:`PlannedRouter` as router of
    experts.

    The given spec stays as it is, and installing twice is the same as installing once (with the second call's suite).
    Call :func:`install_model` on the model that is built from the result; it sets up rotary positions::

        spec = install(get_gpt_layer_local_spec(normalization="RMSNorm"), suite)
        model = install_model(GPTModel(config, spec, ..., position_embedding_type="rope"))

    Args:
        spec: a layer's ModuleSpec (``get_gpt_layer_local_spec()``), a TransformerBlockSubmodules with ``layer_specs``
            (``get_gpt_decoder_block_spec()``), a ModuleSpec of a block that holds one, or the layers of multi-token
            prediction (``get_gpt_mtp_block_spec()``; those that are made from an installed spec are installed
            already). A block without any layer, which a pipeline stage may have, stays as it is.
        suite: the section ``context_parallel_suite`` of the settings.
        alibi: linear biases (ALiBi), which Megatron does not have; then build the GPTModel with
            ``position_embedding_type="none"``, and plans with ``attention_config(config, alibi=True)``.
        packed_cut: how a data loader without plans cuts packed rows over context-parallel ranks, where the model gets
            Megatron's plain PackedSeqParams: "document", each sequence by itself (Megatron's ``--sft``, verl,
            ms-swift), or "row", the whole row (``--dataloader-inter-document-masking``). Batches of planned_batch and
            planned_batch_from are cut by their plan.
        replaces: classes of core attention, besides Megatron's and MindSpeed's DotProductAttention, that
            PlannedAttention takes the place of: what they do beyond the settings of the TransformerConfig is not done.

    Raises:
        ConfigError: a layer has a core attention that is not known, or attends in a way that no plan covers; the spec
            has no self attention; or MindSpeed replaced what planned attention needs.
    """
    check_mindspeed()
    new = copy.deepcopy(spec)
    layers = _layers(new)
    if not layers:  # of a pipeline stage that has the embedding or the loss alone
        return new
    core = ModuleSpec(module=PlannedAttention, params={"suite": suite, "alibi": alibi, "packed_cut": packed_cut})
    replaced = sum(
        [
            _replace(layer, f"layer {i}" if len(layers) > 1 else "the layer", core, replaces)
            for i, layer in enumerate(layers)
        ]
    )
    if not replaced:
        raise ConfigError(
            f"install: found no self attention with a core_attention in this spec ({_name(spec)}, {len(layers)} "
            "layers); valid: a transformer layer's ModuleSpec or TransformerBlockSubmodules with layer_specs, such as "
            "get_gpt_layer_local_spec() and get_gpt_decoder_block_spec() return"
        )
    return new


def _layers(spec: Any) -> list[Any]:
    """Return the layer specs of a layer, of a block's submodules or of a block."""
    for holder in (spec, getattr(spec, "submodules", None)):
        layers = getattr(holder, "layer_specs", None)
        if layers is not None:
            return [_inner_layer(layer) for layer in layers]
    return [_inner_layer(spec)]


def _inner_layer(layer: Any) -> Any:
    """Return the transformer layer inside a layer of multi-token prediction; other layers as they are."""
    parts = getattr(layer, "submodules", None)
    return getattr(parts, "transformer_layer", None) or getattr(parts, "mtp_model_layer", None) or layer


def _replace(layer: Any, where: str, core: ModuleSpec, replaces: Sequence[type]) -> int:
    """Put PlannedAttention into one layer spec, in place; return the number of replaced attentions (0 or 1)."""
    parts: Any = getattr(layer, "submodules", None)
    cross = getattr(parts, "cross_attention", None)
    if getattr(getattr(cross, "submodules", None), "core_attention", None) is not None:
        raise ConfigError(
            f"install: {where} has cross attention ({_name(cross)}); valid: self attention only, a decoder without "
            "encoder"
        )
    attention = getattr(parts, "self_attention", None)
    if attention is None:
        return 0
    module = get_module(attention)
    if module is IdentityOp:
        return 0
    inner: Any = getattr(attention, "submodules", None)
    if getattr(inner, "core_attention", None) is None:
        raise ConfigError(
            f"install: {where} mixes tokens by {_name(attention)}, which has no core_attention to replace; valid: "
            "SelfAttention, since only softmax attention is planned"
        )
    if isinstance(module, type) and issubclass(module, MultiLatentAttention):
        if module not in (MLASelfAttention, PlannedMLASelfAttention):
            raise ConfigError(
                f"install: {where} uses {_name(attention)}; valid: MLASelfAttention, whose rotation in its projections "
                "is known and replaced, or SelfAttention"
            )
        attention.module = PlannedMLASelfAttention
    if isinstance(module, type) and not issubclass(module, Attention):
        raise ConfigError(f"install: {where} uses {_name(attention)}; valid: SelfAttention or a class derived from it")
    _check_core(inner.core_attention, where, replaces)
    inner.core_attention = core
    _replace_router(getattr(parts, "mlp", None))
    return 1


def _check_core(core: Any, where: str, replaces: Sequence[type]) -> None:
    """Raise ConfigError if PlannedAttention may not compute what a layer's core attention does."""
    module: Any = core.module if isinstance(core, ModuleSpec) else core
    package = str(getattr(module, "__module__", "")).split(".")[0]
    is_known = package in _KNOWN_PACKAGES and _name(core).endswith("DotProductAttention")
    if not (is_known or module is PlannedAttention or module in replaces):
        raise ConfigError(
            f"install: core_attention of {where} is {_name(core)}, and PlannedAttention in its place computes what the "
            "TransformerConfig says alone; valid: Megatron's DotProductAttention, with a window as config.window_size "
            f"and config.window_attn_skip_freq; if nothing else is lost, install(spec, suite, replaces=[{_name(core)}])"
        )


def _replace_router(mlp: Any) -> None:
    """Put PlannedRouter into a layer's mixture of experts, if it has one."""
    submodules: Any = mlp.keywords.get("submodules") if isinstance(mlp, partial) else getattr(mlp, "submodules", None)
    if getattr(submodules, "router", None) is TopKRouter:
        submodules.router = PlannedRouter


def _name(spec: Any) -> str:
    module = spec.module if isinstance(spec, ModuleSpec) else spec
    return getattr(module, "__name__", type(module).__name__)
