"""Megatron-core 0.12: modules take no process groups, they ask parallel_state for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLP
from torch import Tensor

#: Argument by which modules are given process groups; None: there is none.
GROUPS: str | None = None

#: True if the loop of megatron.training sums the reports of loss functions over data- and context-parallel ranks.
LOOP_SUMS_REPORTS = False

#: True if counts of tokens, the second value of loss functions, are added up over context-parallel ranks, too.
SUMS_COUNTS = False


def latent_factor_of_scale(config: Any) -> float:
    """Return YaRN's factor in the scale of multi-latent attention; later versions take mscale_all_dim."""
    return float(config.mscale)


def draw_expert(config: Any, submodules: Any, groups: Any) -> None:
    """Draw the initial weights of one expert, and discard it."""
    MLP(config, submodules, is_expert=True)


def latent_rows(batch_size: int) -> str | None:
    """Return why multi-latent attention cannot have so many sequences of the format "sbhd" with parameters."""
    if batch_size == 1:
        return None
    return "its multi-latent attention joins the sequences of a batch that has packed_seq_params, whatever their format"


def counted_tokens(count: Tensor) -> Tensor:
    """Return the second value of a loss function: Megatron adds it up over data-parallel ranks alone, and would divide
    the gradients of all context-parallel ranks by the count of one."""
    group = parallel_state.get_context_parallel_group(check_initialized=False)
    if group is not None and group.size() > 1:
        dist.all_reduce(count, group=group)
    return count


def uncut_tables() -> AbstractContextManager[None]:
    """Leave tables of angles whole while modules are built: nothing is needed, tables are replaced by install_model."""
    return nullcontext()
