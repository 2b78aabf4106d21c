"""Megatron's process groups, and those of pools, with this run's time-out, to the second, and its options of HCCL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from mindspeed_cp.comm.groups import process_group_options
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.megatron.adaptors.pool_groups import PoolGroups
from mindspeed_cp.megatron.patches.swap import replaced

with megatron_imports():
    from megatron.core import parallel_state


@contextmanager
def megatron_groups_with(timeout: timedelta, library: str, options: Mapping[str, int]) -> Iterator[None]:
    """Make Megatron's groups within the block with this time-out and these options.

    Megatron itself counts whole minutes, and its only options of a group are NCCL's (nccl_communicator_config_path).

    Args:
        timeout: time-out of every group.
        library: library of the tensors on devices: "gloo", "hccl", "nccl".
        options: options of HCCL, as for process_group_options.
    """
    create = parallel_state.create_group

    def create_with_options(*arguments: Any, **named: Any) -> Any:
        named["timeout"] = timeout
        if options and named.get("backend") != "gloo":
            # New options for each group, as torch writes the name of the group into them.
            named["pg_options"] = process_group_options(library, options)
        return create(*arguments, **named)

    with replaced(parallel_state, "create_group", create_with_options):
        yield


def open_pool_groups(rank: int, size: int, stages: int, pools: int, tensor: int, moves_shares: bool) -> PoolGroups:
    """Make the groups of all pools of all pipeline stages, and return those of this rank; all ranks call it, within
    `megatron_groups_with`.

    Args:
        rank, size: this rank, and the number of all ranks.
        stages: pipeline stages, of consecutive ranks each.
        pools: pools of a stage, of consecutive ranks each.
        tensor: tensor-parallel ranks, which are consecutive.
        moves_shares: hidden states may move between all ranks of a pool (sequence parallelism).
    """
    ranks_of_pool = size // (stages * pools)
    plan = shares = None
    for first in range(0, size, ranks_of_pool):
        ranks = list(range(first, first + ranks_of_pool))
        for number in range(tensor):
            group = parallel_state.create_group(ranks[number::tensor], group_desc="POOL_GROUP")
            if rank in ranks[number::tensor]:
                plan = group
        if moves_shares:
            group = parallel_state.create_group(ranks, group_desc="TENSOR_AND_POOL_GROUP")
            if rank in ranks:
                shares = group
    assert plan is not None
    return PoolGroups(plan, shares)
