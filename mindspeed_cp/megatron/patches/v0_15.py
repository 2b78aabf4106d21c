"""Megatron-core 0.15 and later: modules take process groups as pg_collection."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

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
    "uncut_tables",
]

GROUPS = "pg_collection"


def all_groups() -> Any:
    """Return the process groups of parallel_state."""
    return ProcessGroupCollection.use_mpu_process_groups()


def latent_factor_of_scale(config: Any) -> float:
    """Return YaRN's factor in the scale of multi-latent attention."""
    return float(config.mscale_all_dim)


def uncut_tables() -> AbstractContextManager[None]:
    """Leave tables of angles whole while modules are built: modules cut them by the group that they are given."""
    return nullcontext()
