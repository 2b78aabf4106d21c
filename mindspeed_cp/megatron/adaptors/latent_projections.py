"""Megatron's projections of multi-latent attention up to the latent, for plans in which latents travel."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import functional as F

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.patches.swap import replaced


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
