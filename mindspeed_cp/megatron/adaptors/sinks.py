"""The parameter of attention sinks in Megatron models: `softmax_offset`, one logit for each head."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


def learnable_sinks(
    config: TransformerConfig, first_head: int, heads: int, softmax_type: str
) -> torch.nn.Parameter | None:
    """Return the parameter of a layer with softmax_type "learnable", drawn as Megatron draws it; None for others.

    Args:
        config: the model's settings.
        first_head, heads: query heads of this tensor-parallel rank.
        softmax_type: "vanilla", "off-by-one" or "learnable".
    """
    if softmax_type != "learnable":
        return None
    whole = torch.zeros(config.num_attention_heads)
    if config.perform_initialization:
        config.init_method(whole)  # of all heads, so that they do not depend on the number of ranks
    device = None if config.use_cpu_initialization or not torch.cuda.is_available() else torch.cuda.current_device()
    own = whole[first_head : first_head + heads].to(device=device, dtype=config.params_dtype, copy=True)
    sinks = torch.nn.Parameter(own)
    # Heads are split over tensor parallelism: norms of gradients count all ranks' sinks.
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    return sinks


def sharded_sinks(module: MegatronModule, prefix: str, sharded_offsets: Any, metadata: Any) -> Any:
    """Return the sharded state of a layer's sinks, split over tensor parallelism, as Megatron's DotProductAttention."""
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    state = {"softmax_offset": module.softmax_offset}
    groups = {"tp_group": module.tp_group}
    if metadata is not None and "dp_cp_group" in metadata:
        groups["dp_cp_group"] = metadata["dp_cp_group"]
    return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)
