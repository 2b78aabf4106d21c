"""MindSpeed's rotation: for multi-latent attention it splits pairs of channels before it looks at the embedding."""

from typing import Any

import megatron.core.models.common.embeddings.rope_utils as rope_utils
import torch
from mindspeed.args_utils import ARGS
from mindspeed.calls import CALLS
from mindspeed.ops.npu_rotary_position_embedding import npu_rotary_position_embedding
from torch import Tensor


def apply_rotary_pos_emb_bshd(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    CALLS["Megatron's rotation"] += 1
    if multi_latent_attention:
        t = torch.cat((t[..., 0::2], t[..., 1::2]), -1)
    width = freqs.shape[-1]
    t, rest = t[..., :width], t[..., width:]
    cos, sin = (torch.cos(freqs) * mscale).to(t.dtype), (torch.sin(freqs) * mscale).to(t.dtype)
    if ARGS.use_fused_rotary_pos_emb:
        t = npu_rotary_position_embedding(t.contiguous(), cos, sin, int(rotary_interleaved))
    else:
        t = t * cos + rope_utils._rotate_half(t, rotary_interleaved) * sin
    return torch.cat((t, rest), -1)


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Any = None, mscale: float = 1.0, cp_group: Any = None
) -> Tensor:
    assert cu_seqlens is None
    return rope_utils._apply_rotary_pos_emb_bshd(
        t, freqs, config.rotary_interleaved, config.multi_latent_attention, mscale
    )
