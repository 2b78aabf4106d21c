"""What Megatron-core 0.12 does otherwise than 0.16 and later, as functions and values that both have.

What is patched in Megatron itself is in :mod:`mindspeed_cp.megatron.patches.compat`; docs/megatron.md says what a new
version needs.
"""

from __future__ import annotations

from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as megatron_yarn
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from mindspeed_cp.megatron.patches.imports import parse_version

#: True for the Megatron-core of MindSpeed's oldest line: modules take no process groups, they ask parallel_state.
IS_0_12 = parse_version(megatron.core.__version__) == (0, 12)

#: Argument by which modules are given process groups; None: there is none.
GROUPS: str | None = None if IS_0_12 else "pg_collection"

#: True if the training loop sums the reports of loss functions, and Megatron-core their counts of tokens, over data-
#: and context-parallel ranks; 0.12 sums counts over data-parallel ranks alone, and reports over none.
SUMS_OVER_RANKS = not IS_0_12


def all_groups() -> Any:
    """Return the process groups of parallel_state, for the argument :data:`GROUPS`."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def latent_factor_of_scale(config: Any) -> float:
    """Return YaRN's factor in the scale of multi-latent attention."""
    return float(config.mscale if IS_0_12 else config.mscale_all_dim)


def draw_expert(config: Any, submodules: Any, groups: Any) -> None:
    """Draw the initial weights of one expert, and discard it."""
    named = {} if IS_0_12 else {"ffn_hidden_size": config.ffn_hidden_size, "tp_group": groups.expt_tp}
    MLP(config, submodules, is_expert=True, **named)


def counted_tokens(count: Tensor) -> Tensor:
    """Return the second value of a loss function from a rank's count of tokens.

    Megatron adds it up over data- and context-parallel ranks; 0.12 over data-parallel ranks alone, and would divide the
    gradients of all context-parallel ranks by the count of one.
    """
    group = parallel_state.get_context_parallel_group(check_initialized=False) if IS_0_12 else None
    if group is not None and group.size() > 1:
        dist.all_reduce(count, group=group)
    return count


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
    if not IS_0_12:  # one row at offset p, for all p at once
        angles, factor = source.get_emb(1, offset=positions.to(device))
        return angles[:, 0], float(factor)
    low, high = megatron_yarn._yarn_find_correction_range(
        source.beta_fast, source.beta_slow, source.dim, source.rotary_base, source.original_max_position_embeddings
    )
    kept = 1.0 - megatron_yarn._yarn_linear_ramp_mask(low, high, source.dim // 2).to(device, torch.float32)
    frequencies = source.inv_freq_inter * (1 - kept) + source.inv_freq_extra * kept
    angles = torch.outer(positions.to(device, source.inv_freq_extra.dtype), frequencies)
    mscale = megatron_yarn._yarn_get_mscale
    factor = mscale(source.scaling_factor, source.mscale) / mscale(source.scaling_factor, source.mscale_all_dim)
    return torch.cat((angles, angles), dim=-1)[:, None], float(factor)
