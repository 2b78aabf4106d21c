"""Megatron-core 0.13 and 0.14: modules take process groups as model_comm_pgs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as megatron_yarn
from megatron.core.process_groups_config import ModelCommProcessGroups

from mindspeed_cp.megatron.patches.since_0_13 import (
    LOOP_SUMS_REPORTS,
    SUMS_COUNTS,
    counted_tokens,
    draw_expert,
    latent_rows,
)
from mindspeed_cp.megatron.patches.swap import replaced

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

GROUPS = "model_comm_pgs"


def all_groups() -> Any:
    """Return the process groups of parallel_state."""
    return ModelCommProcessGroups.use_mpu_process_groups()


def latent_factor_of_scale(config: Any) -> float:
    """Return YaRN's factor in the scale of multi-latent attention."""
    return float(config.mscale if megatron.core.__version__.startswith("0.13") else config.mscale_all_dim)


@contextmanager
def uncut_tables() -> Iterator[None]:
    """Leave the table of YaRN whole while modules are built within the block.

    Its module in 0.13 and 0.14 hands the group that it is given on as another argument, and cuts the table by the
    group of parallel_state, which fails if its rows do not divide by twice the number of ranks.
    """
    with replaced(megatron_yarn, "get_pos_emb_on_this_cp_rank", lambda table, *others: table):
        yield
