"""Process groups of a pool of some data-parallel replicas; Megatron has those of a pool of all replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class PoolGroups:
    """Process groups of this rank's pool.

    Attributes:
        plan: context-parallel ranks of its replicas, numbered replica by replica, of one tensor-parallel number: the
            ranks of a plan.
        tensor: these with all their tensor-parallel ranks, numbered tensor-parallel first, between which hidden states
            move under sequence parallelism; None without it.
    """

    plan: dist.ProcessGroup
    tensor: dist.ProcessGroup | None = None
