"""Arguments of TransformerConfig for the models of these tests."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.megatron.patches.versions import IS_0_12

with megatron_imports():
    from megatron.core.transformer.moe.moe_layer import MoESubmodules

HAS_PLANNED_ROUTER = "router" in MoESubmodules.__dataclass_fields__

SELECTIVE: dict[str, Any] = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
FULL: dict[str, Any] = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)

#: Multi-latent attention, widths odd and unequal.
LATENT: dict[str, Any] = dict(
    multi_latent_attention=True, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=9, qk_pos_emb_head_dim=4, v_head_dim=6,
    rope_type="rope", num_query_groups=4,
)  # fmt: skip
LATENT_YARN: dict[str, Any] = dict(
    rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.5
)
YARN: dict[str, Any] = dict(
    yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=24, yarn_beta_fast=32.0, yarn_beta_slow=1.0,
    yarn_mscale=0.7, yarn_mscale_all_dim=0.0, yarn_correction_range_round_to_int=True,
)  # fmt: skip

#: No power of two, so ALiBi's slopes are those of four heads and two between them.
SIX_HEADS: dict[str, Any] = dict(num_attention_heads=6, num_query_groups=2, kv_channels=6)

NEEDS_PACKED = pytest.mark.skipif(IS_0_12, reason="Megatron-core 0.12 refuses packed_seq_params there")
NEEDS_PLANNED_ROUTER = pytest.mark.skipif(
    not HAS_PLANNED_ROUTER, reason="Megatron-core 0.12 has no place for a router in the spec"
)

#: In 0.12 the router's losses are refused where tokens are split over ranks.
LOSSES: dict[str, Any] = dict(moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01) if HAS_PLANNED_ROUTER else {}
EXPERTS: dict[str, Any] = dict(
    num_moe_experts=4, moe_ffn_hidden_size=24, moe_router_topk=2, moe_token_dispatcher_type="alltoall",
    moe_shared_expert_intermediate_size=16, **LOSSES,
)  # fmt: skip
