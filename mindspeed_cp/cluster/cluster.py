"""What the devices and links of a cluster can do: presets by name, or a YAML file of your own.

Presets stand in `configs/clusters/`, which is installed inside this package.  SI units throughout: seconds, bytes,
bytes/second (one way) and FLOP/s.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mindspeed_cp.config_base import Count, Section
from mindspeed_cp.config_errors import bad_value, meant
from mindspeed_cp.config_file import in_file, read_settings_file
from mindspeed_cp.errors import ConfigError

PRESETS = Path(__file__).parent / "clusters"  # a link to configs/clusters in a checkout, a folder once installed

Rate = Annotated[float, Field(gt=0, le=1e21)]
Seconds = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class ClusterSettings(Section):
    """The keys of a preset; every one must be given.  :class:`Cluster` says what they mean."""

    name: Annotated[str, Field(min_length=1)]
    ranks_per_node: Count
    fabric: Literal["mesh", "switch"]
    pair_bandwidth: Rate
    rank_bandwidth: Rate
    in_node_latency: Seconds
    nics_per_node: Count
    nic_bandwidth: Rate
    network_latency: Seconds
    peak_flops: Rate
    attention_efficiency: Share
    tile_rows: Annotated[float, Field(ge=0, le=1e6)]
    linear_efficiency: Share
    launch: Seconds
    communication_efficiency: Share
    memory: Rate

    @model_validator(mode="after")
    def _links_agree(self) -> ClusterSettings:
        most = self.pair_bandwidth * (1 if self.fabric == "switch" else max(1, self.ranks_per_node - 1))
        if not self.pair_bandwidth <= self.rank_bandwidth <= most * (1 + 1e-6):
            links = (
                f"must be pair_bandwidth, {self.pair_bandwidth:g}: with fabric: switch a rank has one port"
                if self.fabric == "switch"
                else f"must be from pair_bandwidth to pair_bandwidth * {max(1, self.ranks_per_node - 1)} = {most:g}"
            )
            raise bad_value("rank_bandwidth", self.rank_bandwidth, links, "pair_bandwidth")
        return self


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal ranks, the links inside a node, and the NICs between nodes.

    Attributes:
        name: of the preset.
        ranks_per_node: devices (A3: dies) of a node.
        fabric: "mesh": a link for each pair of ranks of a node; "switch": each rank has one port.
        pair_bandwidth: between two ranks of a node when nothing else runs (switch: of the port).
        rank_bandwidth: of all in-node links of one rank together (switch: the same as pair_bandwidth).
        in_node_latency: of a message inside a node.
        nics_per_node: local rank r uses NIC r * nics_per_node // ranks_per_node.
        nic_bandwidth: of one NIC, each way.
        network_latency: of a message between nodes.
        peak_flops: bf16, dense, of one rank.
        attention_efficiency: share of the peak that attention over long tiles reaches.
        tile_rows: a tile whose shorter side has n rows reaches n / (n + tile_rows) of that.
        linear_efficiency: share of the peak that the linear layers reach.
        launch: of one kernel call.
        communication_efficiency: share of the nominal bandwidths that transfers reach.
        memory: bytes of a rank's device.

    Raises:
        ConfigError: a value is out of range; names it and what is valid.
    """

    name: str
    ranks_per_node: int
    fabric: str
    pair_bandwidth: float
    rank_bandwidth: float
    in_node_latency: float
    nics_per_node: int
    nic_bandwidth: float
    network_latency: float
    peak_flops: float
    attention_efficiency: float
    tile_rows: float
    linear_efficiency: float
    launch: float
    communication_efficiency: float
    memory: float

    def __post_init__(self) -> None:
        ClusterSettings(**dataclasses.asdict(self))

    @property
    def effective_pair(self) -> float:
        """Bytes/second that two ranks of a node reach."""
        return self.pair_bandwidth * self.communication_efficiency

    @property
    def effective_rank(self) -> float:
        """Bytes/second that all in-node links of a rank reach together."""
        return self.rank_bandwidth * self.communication_efficiency

    @property
    def effective_nic(self) -> float:
        """Bytes/second that a NIC reaches."""
        return self.nic_bandwidth * self.communication_efficiency

    def nic_of(self, local_rank: int) -> int:
        """The NIC that a rank of a node uses, both numbered from 0 in the node."""
        if not 0 <= local_rank < self.ranks_per_node:
            raise ConfigError(f"local rank {local_rank}: valid: 0 to {self.ranks_per_node - 1}, ranks of a node")
        return local_rank * self.nics_per_node // self.ranks_per_node

    def with_(self, **changes: Any) -> Cluster:
        """The same but for some values.

        Raises:
            ConfigError: no such value, or out of range.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for key in changes:
            if key not in known:
                raise ConfigError(f"{key}: unknown key of a cluster; valid: {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    def with_ranks(self, ranks_per_node: int) -> Cluster:
        """Nodes of which only the first ranks are used: with the links among these and the NICs that are theirs.

        Raises:
            ConfigError: a node does not have so many ranks.
        """
        if not 1 <= ranks_per_node <= self.ranks_per_node:
            raise ConfigError(
                f"ranks_per_node = {ranks_per_node}: a node of cluster {self.name} has {self.ranks_per_node} ranks; "
                f"valid: 1 to {self.ranks_per_node}, or a cluster file with another ranks_per_node"
            )
        rank_bandwidth = self.rank_bandwidth
        if self.fabric == "mesh":
            rank_bandwidth = min(rank_bandwidth, self.pair_bandwidth * max(1, ranks_per_node - 1))
        return self.with_(
            ranks_per_node=ranks_per_node,
            rank_bandwidth=rank_bandwidth,
            nics_per_node=self.nic_of(ranks_per_node - 1) + 1,
        )


def cluster_names() -> list[str]:
    """The presets that are installed, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A preset by its name, such as "a2", or a YAML file with the same keys.

    Raises:
        ConfigError: no such preset (names those there are) or file; a key is missing, unknown, or out of range, told
            with the place in the file.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, str) and text in cluster_names():
        return _preset(text)
    path = Path(name_or_path)
    if isinstance(name_or_path, str) and path.suffix not in (".yaml", ".yml") and path.name == text:
        names = cluster_names()
        near = meant(text.lower(), names)
        raise ConfigError(
            f"cluster {text!r}: no such preset; {f'did you mean {near}? ' if near else ''}"
            f"valid: {', '.join(names)}, or the path of a YAML file with the keys of one"
        )
    if not path.is_file():
        valid = f"the path of a YAML file with the keys of a preset, or {', '.join(cluster_names())}"
        raise ConfigError(f"cluster {text}: no such file; valid: {valid}")
    return _read(path)


@lru_cache
def _preset(name: str) -> Cluster:
    return _read(PRESETS / f"{name}.yaml")


def _read(path: Path) -> Cluster:
    file = read_settings_file(path)
    settings = in_file(file, "", lambda: ClusterSettings(**file.data))
    return Cluster(**settings.model_dump())
