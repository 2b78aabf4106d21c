"""YaRN's angles at any positions, for every version of Megatron-core: before 0.16 its module gives tables alone."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as megatron_yarn
from torch import Tensor


def yarn_angles(source: Any, positions: Tensor) -> tuple[Tensor, float]:
    """Return YaRN's angles and the factor of their cos and sin.

    Bit for bit those of Megatron's table, without the part of it that Megatron cuts off for other context-parallel
    ranks.

    Args:
        source: Megatron's YarnRotaryEmbedding.
        positions: of rows, [rows].

    Returns:
        (angles, fp32 [rows, 1, dim]; factor).
    """
    device = source.inv_freq_extra.device
    if hasattr(source, "get_emb"):  # 0.16 and later
        # One row at offset p for all p at once.
        angles, factor = source.get_emb(1, offset=positions.to(device))
        return angles[:, 0], float(factor)
    low, high = megatron_yarn._yarn_find_correction_range(
        source.beta_fast,
        source.beta_slow,
        source.dim,
        source.rotary_base,
        source.original_max_position_embeddings,
        *([source.correction_range_round_to_int] if hasattr(source, "correction_range_round_to_int") else []),  # 0.15
    )
    ramp = megatron_yarn._yarn_linear_ramp_mask(low, high, source.dim // 2).to(device, torch.float32)
    kept = 1.0 - ramp
    frequencies = source.inv_freq_inter * (1 - kept) + source.inv_freq_extra * kept
    angles = torch.outer(positions.to(device, source.inv_freq_extra.dtype), frequencies)
    return torch.cat((angles, angles), dim=-1)[:, None], float(_factor(source))


def _factor(source: Any) -> float:
    if hasattr(megatron_yarn, "_yarn_get_concentration_factor"):  # 0.15
        return float(
            megatron_yarn._yarn_get_concentration_factor(source.scaling_factor, source.mscale, source.mscale_all_dim)
        )
    mscale = megatron_yarn._yarn_get_mscale
    return float(mscale(source.scaling_factor, source.mscale) / mscale(source.scaling_factor, source.mscale_all_dim))
