"""The numbers that a launcher gives to a rank, and the store through which ranks agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
START = (
    "start the ranks with torchrun: torchrun --nnodes 2 --nproc-per-node 8 ... -m mindspeed_cp doctor --cluster "
    "(docs/clusters.md has it for Slurm too)"
)


@dataclass(frozen=True)
class Launch:
    """A rank among all, as its launcher says.

    Attributes:
        rank, ranks: number of this rank, and of all ranks; ranks are numbered node by node.
        local_rank, ranks_per_node: number of this rank on its node, and of the ranks there.
        address, port: store of the ranks.
        agent_store: True if the launcher serves the store (torchrun), else rank 0 does.
        attempt: number of the launcher's attempt; each has keys of its own.
    """

    rank: int
    ranks: int
    local_rank: int
    ranks_per_node: int
    address: str
    port: int
    agent_store: bool = False
    attempt: int = 0

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.ranks_per_node

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.rank // self.ranks_per_node


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Read what torchrun tells a rank.

    Raises:
        ConfigError: the process was not started by torchrun, there is one rank only, or nodes have different numbers of
            ranks.
    """
    missing = [name for name in (*NUMBERS, "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise ConfigError(f"--cluster: {missing[0]} is not set; {START}")
    try:
        rank, ranks, local_rank, per_node, port = (int(environment[name]) for name in (*NUMBERS, "MASTER_PORT"))
    except ValueError:
        texts = ", ".join(f"{name}={environment[name]}" for name in (*NUMBERS, "MASTER_PORT"))
        raise ConfigError(f"--cluster: {texts}: must be whole numbers; {START}") from None
    if ranks < 2:
        raise ConfigError(
            f"--cluster: WORLD_SIZE is {ranks}, and one rank has no links; valid: 2 or more (--nproc-per-node 2); for "
            "one device: mindspeed-cp doctor"
        )
    if not 0 <= local_rank < per_node <= ranks or ranks % per_node or rank % per_node != local_rank:
        raise ConfigError(
            f"--cluster: rank {rank} of {ranks} is local rank {local_rank} of {per_node}; valid: the same number of "
            "ranks on every node, numbered node by node"
        )
    return Launch(
        rank, ranks, local_rank, per_node, environment["MASTER_ADDR"], port,
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0),
    )  # fmt: skip


def open_store(launch: Launch, seconds: float, *, serve: bool = True) -> dist.Store:
    """Connect to the store of the ranks.

    Args:
        launch: this rank.
        seconds: limit of a connection and of a call.
        serve: True on the supervisor of rank 0, which serves the store unless the launcher does.

    Raises:
        ConfigError: the store cannot be reached.
    """
    from datetime import timedelta

    import torch.distributed as dist

    serves = serve and launch.rank == 0 and not launch.agent_store
    try:
        store = dist.TCPStore(
            launch.address, launch.port, None, serves, timedelta(seconds=seconds), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"MASTER_ADDR={launch.address}, MASTER_PORT={launch.port}: rank {launch.rank} reaches no store there "
            f"({' '.join(str(error).split())[:160]}); check that rank 0 has started and that no firewall is between"
        ) from None
    return dist.PrefixStore(f"mindspeed-cp/cluster-check/{launch.attempt}", store)
