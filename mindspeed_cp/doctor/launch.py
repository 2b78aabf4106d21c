"""The numbers that torchrun gives to a rank."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindspeed_cp.errors import ConfigError

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """A rank among all.

    Attributes:
        rank, ranks: number of this rank, and of all ranks; ranks are numbered node by node.
        local_rank, ranks_per_node: number of this rank on its node, and of the ranks there.
    """

    rank: int
    ranks: int
    local_rank: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.ranks_per_node


def is_launched() -> bool:
    """Return True if a launcher has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def read_launch(command: str) -> Launch:
    """Read what torchrun tells a rank.

    Args:
        command: words of this command, for errors.

    Raises:
        ConfigError: the process was not started by torchrun, there is one rank only, or nodes have different numbers of
            ranks.
    """
    start = f"torchrun --nnodes 2 --nproc-per-node 8 ... -m mindspeed_cp {command}"
    missing = [name for name in (*NUMBERS, "MASTER_ADDR") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not set, but RANK and WORLD_SIZE are; start the ranks with {start}, or one process "
            "without these variables"
        )
    try:
        rank, ranks, local_rank, per_node, _ = (int(os.environ[name]) for name in NUMBERS)
    except ValueError:
        texts = ", ".join(f"{name}={os.environ[name]}" for name in NUMBERS)
        raise ConfigError(f"{texts}: must be whole numbers; start the ranks with {start}") from None
    if ranks < 2:
        raise ConfigError(f"WORLD_SIZE is {ranks}, and one rank has no links; valid: 2 or more (--nproc-per-node 2)")
    if not 0 <= local_rank < per_node <= ranks or ranks % per_node or rank % per_node != local_rank:
        raise ConfigError(
            f"rank {rank} of {ranks} is local rank {local_rank} of {per_node}; valid: the same number of ranks on "
            "every node, numbered node by node"
        )
    return Launch(rank, ranks, local_rank, per_node)
