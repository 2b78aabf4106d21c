"""Multi-latent attention whose rotation is left to PlannedAttention, and whose latents may travel."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from torch.nn import functional as F

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.core_attention import PlannedAttention
from mindspeed_cp.megatron.adaptors.rotary import UncutGroup
from mindspeed_cp.megatron.mindspeed_compat import without_rotation
from mindspeed_cp.megatron.patches import versions
from mindspeed_cp.megatron.patches.compat import replaced


def latent_projections(layer: Any, hidden_states: Tensor, splits_positions: bool) -> tuple[Tensor, ...]:
    """Return query, shared channels of the keys, and latent, none of them rotated; then what Megatron returns beside.

    The same modules are called as in MLASelfAttention.get_query_key_value_tensors, in the same order, except that the
    up-projection of keys and values returns its input as it reaches every tensor-parallel rank: readers apply the
    weight. Gradients of the latent and of the shared channels are sums over this rank's heads, which are added up over
    the tensor-parallel ranks where Megatron adds those of the up-projection's input.

    Args:
        layer: the MLASelfAttention.
        hidden_states: [s, b, hidden], under sequence parallelism this rank's rows.
        splits_positions: the projection down is split over tensor-parallel ranks.

    Returns:
        Query [s, b, heads, dim], shared channels [s, b, 1, channels] and latent [s, b, 1, channels].

    Raises:
        ConfigError: the up-projection has no plain weight.
    """
    config, width = layer.config, [layer.config.kv_lora_rank, layer.config.qk_pos_emb_head_dim]
    compressed = hidden_states
    if config.q_lora_rank is None:
        q, _ = layer.linear_q_proj(hidden_states)
    else:
        compressed, _ = layer.linear_q_down_proj(hidden_states)
        if compressed.shape[-1] != config.q_lora_rank:
            compressed = gather_from_tensor_model_parallel_region(compressed)
            compressed = scatter_to_sequence_parallel_region(compressed) if config.sequence_parallel else compressed
        compressed = layer.q_layernorm(compressed)
        q, _ = layer.linear_q_up_proj(compressed)
    combined, _ = layer.linear_kv_down_proj(hidden_states)
    if splits_positions:
        latent, shared = gather_from_tensor_model_parallel_region(combined).split(width, -1)
        latent = scatter_to_sequence_parallel_region(latent) if config.sequence_parallel else latent
        shared = copy_to_tensor_model_parallel_region(shared)
    else:
        latent, shared = combined.split(width, -1)
        shared = gather_from_sequence_parallel_region(shared) if config.sequence_parallel else shared
    latent = layer.kv_layernorm(latent)
    module = layer.linear_kv_up_proj
    with replaced(module, "forward", lambda x: _input_of(module, x, config)):  # called, as hooks fetch its weight
        whole = module(latent)
    q = q.view(*q.shape[:-1], -1, config.qk_head_dim + config.qk_pos_emb_head_dim)
    return q, shared.unsqueeze(-2), whole.unsqueeze(-2), compressed, latent


def _input_of(module: Any, x: Tensor, config: Any) -> Tensor:
    """Return the input of a projection that is split by columns as every tensor-parallel rank multiplies it; its
    gradient is added up over them.

    Raises:
        ConfigError: the module has no weight, or a bias.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or (isinstance(bias, Tensor) and bias.numel()):
        kind = "no weight of its own" if not isinstance(weight, Tensor) else "a bias"
        raise ConfigError(
            f"latents travel in this plan, but linear_kv_up_proj is a {type(module).__name__} with {kind}; valid: a "
            "linear layer without bias, or context_parallel_suite.latents: 'off'"
        )
    if getattr(module, "layer_norm_weight", None) is not None:  # Transformer Engine's, with the norm in it
        x = _normed(module, x)
    if config.sequence_parallel:
        gathered: Tensor = gather_from_sequence_parallel_region(x)
        return gathered
    copied: Tensor = copy_to_tensor_model_parallel_region(x)
    return copied


def _normed(module: Any, x: Tensor) -> Tensor:
    """Return rows normed as a module does that norms its own input.

    Raises:
        ConfigError: by another norm than RMSNorm.
    """
    kind = getattr(module, "normalization", None)
    if kind != "RMSNorm":
        raise ConfigError(
            f"latents travel in this plan, but linear_kv_up_proj norms its input by {kind!r}; valid: 'RMSNorm', or "
            "context_parallel_suite.latents: 'off'"
        )
    gamma = module.layer_norm_weight.float()
    gamma = gamma + 1.0 if getattr(module, "zero_centered_gamma", False) else gamma
    return F.rms_norm(x.float(), (x.shape[-1],), gamma, module.eps).to(x.dtype)


class PlannedMLASelfAttention(MLASelfAttention):
    """Megatron's MLASelfAttention for planned batches; :func:`install` puts it into the spec.

    Megatron's rotates inside its projections, and cuts packed rows there by the zig-zag of whole documents. This one
    computes the projections as for one unpacked sequence of this rank's rows, and leaves the rotation to
    :class:`LatentRotary` in PlannedAttention. Parameters and checkpoints are the same.
    """

    core_attention: PlannedAttention

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if versions.GROUPS is not None:
            groups = copy.copy(kwargs.get(versions.GROUPS) or versions.all_groups())
            groups.cp = UncutGroup(groups.cp)
            kwargs[versions.GROUPS] = groups
        super().__init__(*args, **kwargs)
        if versions.GROUPS is not None:
            self.rotary_pos_emb.cp_group = groups.cp
        self.core_attention.use_up_projection(self.linear_kv_up_proj)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        """Return query and key, not yet rotated, value, and the other results of Megatron.

        Shapes are [t, heads, dim]. Where the plan lets latents travel, key is the one head of channels that all heads
        share, and value the latent.

        Raises:
            ConfigError: install_model was not called, Megatron generates, or latents travel and the up-projection is
                of a kind that cannot be applied to them by readers.
        """
        if inference_context is not None or others.get("inference_params") is not None:
            raise ConfigError(
                "planned attention trains and evaluates only; generate with a model built from the original spec"
            )
        _, plan = self.core_attention.plan_of(packed_seq_params)
        if plan.attention.latent is not None:
            query, key, value, *rest = latent_projections(self, hidden_states, self._halves_positions())
        else:
            project = without_rotation(MLASelfAttention.get_query_key_value_tensors)
            query, key, value, *rest = project(self, hidden_states, key_value_states, position_ids, None)
            if self._halves_positions():
                key = _SumOfPositions.apply(key, self.config.qk_head_dim, self.core_attention.tp_group)
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        return (query, key, value) if versions.IS_0_12 else (query, key, value, *rest)

    def _run_core_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
    ) -> Tensor:
        """Call core attention; Megatron 0.19 would widen values of packed rows to the width of keys."""
        return self.core_attention(query, key, value, attention_mask, **others)

    def _halves_positions(self) -> bool:
        """True where Megatron (0.16 to 0.19) loses a part of a gradient.

        All heads of all tensor-parallel ranks share the channels of the keys that carry positions. If their projection
        is split over these ranks, Megatron gathers its output, and in the backward gives every rank its part of its own
        heads' gradient, not of the sum over all ranks' heads.
        """
        split: bool = self.linear_kv_down_proj.weight.shape[0] < (
            self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        )
        return split


class _SumOfPositions(torch.autograd.Function):
    """Identity whose backward sums the gradient of the channels that all heads share over the heads of all ranks. The
    first head gets the sum and the others zero, as the backward of the expansion adds up all heads."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = first, group
        return key.view_as(key)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        first, group = ctx.arguments
        content, shared = gradient.split([first, gradient.shape[-1] - first], dim=-1)
        total = shared.sum(-2, keepdim=True)
        dist.all_reduce(total, group=group)
        others = total.new_zeros(1).expand_as(shared[..., 1:, :])
        return torch.cat((content, torch.cat((total, others), dim=-2)), dim=-1), None, None
