"""local_spec: a spec of GPT layers that needs Megatron-core only, for every layout."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import torch_norm
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from mindspeed_cp.megatron.mindspeed_compat import replaced_by
from mindspeed_cp.megatron.patches import versions


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
    submodules: Any = mlp.keywords.get("submodules") if isinstance(mlp, partial) else getattr(mlp, "submodules", None)
    experts = getattr(submodules, "experts", None)
    if isinstance(experts, ModuleSpec) and experts.module is SequentialMLP:
        experts.module = DrawnExperts
    elif isinstance(experts, partial) and experts.func is SequentialMLP:
        submodules.experts = partial(DrawnExperts, *experts.args, **experts.keywords)
