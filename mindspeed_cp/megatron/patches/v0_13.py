"""Megatron-core 0.13 and 0.14: modules take process groups as model_comm_pgs."""

from __future__ import annotations

from typing import Any

import megatron.core
from megatron.core.process_groups_config import ModelCommProcessGroups

from mindspeed_cp.megatron.patches.since_0_13 import (
    LOOP_SUMS_REPORTS,
    SUMS_COUNTS,
    counted_tokens,
    draw_expert,
    latent_rows,
)

__all__ = [
    "GROUPS",
    "LOOP_SUMS_REPORTS",
    "SUMS_COUNTS",
    "all_groups",
    "counted_tokens",
    "draw_expert",
    "latent_factor_of_scale",
    "latent_rows",
]

GROUPS = "model_comm_pgs"


def all_groups() -> Any:
    """Return the process groups of parallel_state."""
    return ModelCommProcessGroups.use_mpu_process_groups()


def latent_factor_of_scale(config: Any) -> float:
    """Return YaRN's factor in the scale of multi-latent attention."""
    return float(config.mscale if megatron.core.__version__.startswith("0.13") else config.mscale_all_dim)
