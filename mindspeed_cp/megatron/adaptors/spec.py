"""Specs: install puts planned attention into one, local_spec makes one of Megatron-core alone, for every layout."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import torch_norm
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.core_attention import PlannedAttention
from mindspeed_cp.megatron.adaptors.latent import PlannedMLASelfAttention
from mindspeed_cp.megatron.adaptors.router import PlannedRouter
from mindspeed_cp.megatron.mindspeed_compat import check_mindspeed, replaced_by
from mindspeed_cp.megatron.patches import versions

SpecT = TypeVar("SpecT")


#: Packages whose classes named ...DotProductAttention compute what a TransformerConfig says, and nothing else.
_KNOWN_PACKAGES = ("megatron", "mindspeed", "mindspeed_llm")


def install(
    spec: SpecT,
    suite: SuiteSettings,
    *,
    alibi: bool = False,
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
    core = ModuleSpec(module=PlannedAttention, params={"suite": suite, "alibi": alibi})
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
    submodules = _submodules(mlp)
    if getattr(submodules, "router", None) is TopKRouter:
        submodules.router = PlannedRouter


def _submodules(mlp: Any) -> Any:
    """Return the parts of an MLP's spec, which is a partial from 0.17 on; None if it has none."""
    return mlp.keywords.get("submodules") if isinstance(mlp, partial) else getattr(mlp, "submodules", None)


def _name(spec: Any) -> str:
    module = spec.module if isinstance(spec, ModuleSpec) else spec
    return getattr(module, "__name__", type(module).__name__)


def local_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return Megatron's own local spec of all layers of this pipeline stage, for :func:`install`.

    Two of its parts are replaced, without change to the model: torch's norms, which Megatron refuses under sequence
    parallelism, by :class:`LocalNorm` (beside MindSpeed its fused norms stay), and experts by :class:`DrawnExperts`.

    Args:
        config: settings of a GPT; normalization, multi_latent_attention, qk_layernorm, num_moe_experts and
            moe_layer_freq are read.
        vp_stage: virtual pipeline stage, of interleaved schedules.
    """
    norm = _norm()
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
        **stage_arguments(get_gpt_decoder_block_spec, vp_stage),
    )
    shared = copy.deepcopy(block.layer_specs)  # all in one copy: layers that are one spec stay one
    for layer in shared:
        _use_norms(layer.submodules, norm)
        attention = layer.submodules.self_attention.submodules
        _use_norms(attention, norm)
        if config.multi_latent_attention and config.q_lora_rank is None:
            attention.q_layernorm = IdentityOp  # 0.19 refuses a norm that nothing calls
        _use_drawn_experts(layer.submodules.mlp)
    return TransformerBlockSubmodules(layer_specs=shared, layer_norm=norm)


def local_mtp_spec(config: TransformerConfig, spec: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's own local spec of the layers of multi-token prediction, with torch's norms as in local_spec.

    Args:
        config: settings of a GPT with mtp_num_layers.
        spec: of the decoder, installed already or not; its last layer is that of multi-token prediction.
        vp_stage: virtual pipeline stage, of interleaved schedules.

    Returns:
        MultiTokenPredictionBlockSubmodules, mtp_block_spec of GPTModel; None on pipeline stages without such layers.
    """
    stage = stage_arguments(get_gpt_mtp_block_spec, vp_stage)
    block = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **stage)
    for layer in block.layer_specs if block is not None else ():
        _use_norms(layer.submodules, _norm())
    return block


def stage_arguments(function: Callable[..., Any], vp_stage: int | None) -> dict[str, Any]:
    """Return the keyword that tells a function of Megatron the virtual stage; 0.12 asks parallel_state."""
    return {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(function).parameters else {}


class LocalNorm:
    """torch's RMSNorm or LayerNorm; Megatron sums its gradient over tensor-parallel ranks that share the rows.

    Attributes:
        modules: module by Megatron's name of the normalization.
    """

    modules: ClassVar[dict[str, type[nn.Module]]] = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norm = cls.modules[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class DrawnExperts(SequentialMLP):
    """Experts whose initial weights on the CPU depend only on the seed, not on the rank that holds them.

    Megatron draws only the experts of the rank, so that these, and all weights after them, would depend on the
    expert-parallel size. This class draws the others too, in order, and discards them.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        **groups: Any,
    ) -> None:
        given = groups.get(versions.GROUPS) if versions.GROUPS is not None else None
        ep = given.ep if given is not None else parallel_state.get_expert_model_parallel_group()
        rank, ranks = ep.rank(), ep.size()
        own = copy.copy(config)
        own.ffn_hidden_size = config.moe_ffn_hidden_size  # as SequentialMLP has it

        def skip(skipped_ranks: int) -> None:
            if not config.use_cpu_initialization:  # on a device every rank has a generator of its own for its experts
                return
            for _ in range(skipped_ranks * num_local_experts):
                versions.draw_expert(own, submodules, given)

        skip(rank)
        super().__init__(num_local_experts, config, submodules, **groups)
        skip(ranks - 1 - rank)
        for parameter in self.parameters():
            # Megatron 0.16 sets it for more than one expert-parallel rank only. Else an expert's gradient would not be
            # summed over tensor-parallel ranks, which have rows of their own, and checkpoints would look different.
            parameter.allreduce = False


def _use_norms(submodules: Any, norm: type[LocalNorm]) -> None:
    for name, value in vars(submodules).items():
        if value is torch_norm.WrappedTorchNorm:
            setattr(submodules, name, norm)


def _norm() -> Any:
    """Return LocalNorm, or MindSpeed's fused norms in place of Megatron's, which know sequence parallelism."""
    fused = replaced_by("megatron.core.transformer.torch_norm.WrappedTorchNorm")
    return torch_norm.WrappedTorchNorm if fused else LocalNorm


def _use_drawn_experts(mlp: Any) -> None:
    submodules = _submodules(mlp)
    experts = getattr(submodules, "experts", None)
    if isinstance(experts, ModuleSpec) and experts.module is SequentialMLP:
        experts.module = DrawnExperts
    elif isinstance(experts, partial) and experts.func is SequentialMLP:
        submodules.experts = partial(DrawnExperts, *experts.args, **experts.keywords)
