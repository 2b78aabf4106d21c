"""Megatron up to 0.12: token counts are summed over data-parallel ranks, and not over context-parallel ones."""

from __future__ import annotations

import megatron.core
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.megatron.patches.imports import parse_version


def finalize_sums_context() -> bool:
    """Return True if the Megatron at hand sums token counts over context-parallel ranks too (0.14 does)."""
    return parse_version(megatron.core.__version__) >= (0, 14)


def counts_without_context(count: Tensor, cp_group: dist.ProcessGroup) -> Tensor:
    """Return the count over all context-parallel ranks, which a Megatron that does not sum over them needs."""
    count = count.clone()
    dist.all_reduce(count, group=cp_group)
    return count
