"""What Megatron-core 0.13 and all later versions have in common: names of v0_13 and v0_15."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

#: True if the loop of megatron.training sums the reports of loss functions over data- and context-parallel ranks.
LOOP_SUMS_REPORTS = True

#: True if counts of tokens, the second value of loss functions, are added up over context-parallel ranks, too.
SUMS_COUNTS = True


def draw_expert(config: Any, submodules: Any, groups: Any) -> None:
    """Draw the initial weights of one expert, and discard it."""
    MLP(
        config,
        submodules,
        ffn_hidden_size=config.ffn_hidden_size,
        is_expert=True,
        tp_group=groups.expt_tp,
    )


def latent_rows(batch_size: int) -> str | None:
    """Return why multi-latent attention cannot have so many sequences of the format "sbhd" with parameters: None."""
    return None


def counted_tokens(count: Tensor) -> Tensor:
    """Return the second value of a loss function: Megatron adds it up over data- and context-parallel ranks."""
    return count
