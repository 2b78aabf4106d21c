"""MindSpeed's multi-latent attention: core attention is told neither widths nor groups."""

import math
from typing import Any

from megatron.core.models.common.embeddings import RotaryEmbedding, _yarn_get_mscale
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.spec_utils import build_module
from mindspeed.calls import CALLS


def multi_latent_attention_init_impl(
    self: Any,
    config: Any,
    submodules: Any,
    layer_number: int,
    attn_mask_type: Any,
    attention_type: str,
    cp_comm_type: str | None = None,
    **groups: Any,
) -> None:
    CALLS["MultiLatentAttention.__init__"] += 1
    Attention.__init__(
        self, config, submodules, layer_number, attn_mask_type, attention_type, cp_comm_type, **groups
    )  # fmt: skip
    self.query_projection_size = config.v_head_dim * config.num_attention_heads
    self.q_head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
    self.key_hidden_size, self.val_hidden_size = self.q_head_dim, config.v_head_dim
    self.recompute_up_proj = config.recompute_granularity == "selective" and "mla_up_proj" in config.recompute_modules
    self.qkv_up_checkpoint = None
    mscale = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale)
    self.softmax_scale = mscale * mscale / math.sqrt(self.q_head_dim)
    self.cache_mla_latents = getattr(config, "cache_mla_latents", False)
    assert config.rope_type == "rope"
    self.rotary_pos_emb = RotaryEmbedding(
        config.qk_pos_emb_head_dim, rotary_percent=config.rotary_percent, rotary_base=config.rotary_base
    )
    self.core_attention = build_module(
        submodules.core_attention,
        config=config,
        layer_number=layer_number,
        attn_mask_type=attn_mask_type,
        attention_type=attention_type,
        softmax_scale=self.softmax_scale,
        cp_comm_type=cp_comm_type,
    )
    self.linear_proj = build_module(
        submodules.linear_proj,
        self.query_projection_size,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=config.add_bias_linear,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_comm_buffer_name="proj",
    )
