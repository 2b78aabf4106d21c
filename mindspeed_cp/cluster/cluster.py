"""Devices and links of a cluster: presets by name, or a YAML file.

Presets are in `configs/clusters/`, which is installed inside this package. All units are SI: seconds, bytes,
bytes/second (one direction) and FLOP/s.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.problem import Topology
from mindspeed_cp.schema.base import PositiveInt, Section
from mindspeed_cp.schema.messages import bad_value, closest_names, did_you_mean
from mindspeed_cp.schema.numbers import check_type
from mindspeed_cp.schema.yaml_file import read_settings_file, with_file_location

PRESET_FOLDER = Path(__file__).parent / "presets"  # a link to configs/clusters in a checkout, a folder once installed

#: The cluster whose speeds are used if a topology names none.
DEFAULT_CLUSTER = "a2"

#: Seconds of posting a message where a cluster file says nothing, as files written before the key was there.
DEFAULT_POSTING = 2.5e-6

Rate = Annotated[float, Field(gt=0, le=1e21)]
Seconds = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]


#: Values that may have a range.
RANGED = (
    "attention_efficiency", "linear_efficiency", "communication_efficiency", "launch", "posting", "in_node_latency",
    "network_latency",
)  # fmt: skip


class KernelTime(Section):
    """A measured time of an attention kernel, for sequences of one size, with the copies and merges around it.

    Attributes:
        kernel: a kernel of the cuda backend.
        rows, keys: queries and keys of a sequence.
        forward, backward: time per visible pair, in any unit that the times of all kernels share.
    """

    kernel: Literal["flash4", "flash", "tiles"]
    rows: PositiveInt
    keys: PositiveInt
    forward: Annotated[float, Field(gt=0)]
    backward: Annotated[float, Field(gt=0)]


class Cluster(Section):
    """Nodes with equal numbers of ranks, the links inside a node, and the NICs between nodes: the keys of a preset.

    Attributes:
        name: preset name.
        ranks_per_node: devices of a node (A3: dies).
        fabric: "mesh" (a link for each pair of ranks of a node) or "switch" (one port for each rank).
        pair_bandwidth: bandwidth between two ranks of an otherwise idle node (switch: of the port).
        rank_bandwidth: total bandwidth of the in-node links of one rank (switch: equal to pair_bandwidth).
        in_node_latency: latency of a message inside a node.
        nics_per_node: NICs of a node; rank r of a node uses NIC r * nics_per_node // ranks_per_node.
        nic_bandwidth: bandwidth of one NIC in each direction.
        network_latency: latency of a message between nodes.
        peak_flops: dense bf16 peak of one rank.
        attention_efficiency: share of the peak that attention reaches on long tiles.
        tile_rows: a tile whose shorter side has n rows reaches n / (n + tile_rows) of the long-tile rate.
        linear_efficiency: share of the peak that linear layers reach.
        launch: seconds of one kernel launch.
        communication_efficiency: share of the nominal bandwidths that transfers reach.
        memory: bytes of a rank's device.
        posting: seconds in which a rank computes nothing, for each message that it posts, a send or a receive.
        device: name of the device that `calibrate` measured; empty: none.
        kernel_times: times of the kernels of that device, by which the cuda backend chooses; empty: those of an H200.
        ranges: the least and the most that values may be, by name; values without a range are taken as certain.

    Raises:
        ConfigError: A value is out of range. The message names it and the valid values.
    """

    name: Annotated[str, Field(min_length=1)]
    ranks_per_node: PositiveInt
    fabric: Literal["mesh", "switch"]
    pair_bandwidth: Rate
    rank_bandwidth: Rate
    in_node_latency: Seconds
    nics_per_node: PositiveInt
    nic_bandwidth: Rate
    network_latency: Seconds
    peak_flops: Rate
    attention_efficiency: Share
    tile_rows: Annotated[float, Field(ge=0, le=1e6)]
    linear_efficiency: Share
    launch: Seconds
    communication_efficiency: Share
    memory: Rate
    posting: Seconds = DEFAULT_POSTING
    device: str = ""
    kernel_times: Annotated[tuple[KernelTime, ...], Field(strict=False)] = ()  # a file has a list
    ranges: dict[str, tuple[float, float]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _links_agree(self) -> Cluster:
        peers = 1 if self.fabric == "switch" else max(1, self.ranks_per_node - 1)
        upper_bound = self.pair_bandwidth * peers
        if not self.pair_bandwidth <= self.rank_bandwidth <= upper_bound * (1 + 1e-6):
            rule = (
                f"must be pair_bandwidth, {self.pair_bandwidth:g}: with fabric: switch a rank has one port"
                if self.fabric == "switch"
                else f"must be from pair_bandwidth to pair_bandwidth * {peers} = {upper_bound:g}"
            )
            raise bad_value("rank_bandwidth", self.rank_bandwidth, rule)
        return self

    @field_validator("ranges", mode="before")
    @classmethod
    def _are_ranges(cls, ranges: Any) -> Any:
        rule = f"must be a mapping of {', '.join(RANGED)} to the least and the most that each may be"
        if not isinstance(ranges, dict) or not set(ranges) <= set(RANGED):
            raise bad_value("ranges", ranges, rule)
        for name, ends in ranges.items():
            numbers = ends if isinstance(ends, (list, tuple)) else ()
            if len(numbers) != 2 or any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in numbers):
                raise bad_value(f"ranges.{name}", ends, "must be two numbers, the least and the most that it may be")
        return {name: (float(least), float(most)) for name, (least, most) in ranges.items()}

    @model_validator(mode="after")
    def _ranges_hold(self) -> Cluster:
        for name, (least, most) in self.ranges.items():
            value, above = getattr(self, name), " above 0" if name.endswith("efficiency") else ""
            if not 0 <= least <= value <= most <= 1 or (above and not least):
                rule = f"must be the least and the most that {name} = {value:g} may be, from 0{above} to 1"
                raise bad_value(f"ranges.{name}", [least, most], rule)
        return self

    def __hash__(self) -> int:
        """Return a hash of the values without the ranges, which are a mapping."""
        return hash(tuple(value for key, value in self if key != "ranges"))

    @property
    def effective_pair(self) -> float:
        """Bytes/second that two ranks of a node reach."""
        return self.pair_bandwidth * self.communication_efficiency

    @property
    def effective_rank(self) -> float:
        """Bytes/second that the in-node links of a rank reach together."""
        return self.rank_bandwidth * self.communication_efficiency

    @property
    def effective_nic(self) -> float:
        """Bytes/second that a NIC reaches."""
        return self.nic_bandwidth * self.communication_efficiency

    def nic_of(self, rank: Any) -> Any:
        """Return the NIC of a rank, or of an array of ranks; both are numbered over all nodes."""
        node, local_rank = rank // self.ranks_per_node, rank % self.ranks_per_node
        return node * self.nics_per_node + local_rank * self.nics_per_node // self.ranks_per_node

    def with_values(self, **changes: Any) -> Cluster:
        """Return a copy with some values changed; those that have a range lose it.

        Raises:
            ConfigError: A name is unknown or a value is out of range.
        """
        ranges = {name: ends for name, ends in self.ranges.items() if name not in changes}
        return Cluster(**{**dict(self), "ranges": ranges, **changes})

    def at_range_end(self, slow: bool, names: Iterable[str] = RANGED) -> Cluster:
        """Return the cluster with some values at the slow or at the fast end of their ranges.

        Args:
            slow: the end at which everything takes longer.
            names: of RANGED; those without a range stay as they are.
        """
        ends = {name: self.ranges[name] for name in names if name in self.ranges}
        return self.with_values(**{name: end[slow != name.endswith("efficiency")] for name, end in ends.items()})

    def with_ranks(self, ranks_per_node: int) -> Cluster:
        """Return the cluster with only the first ranks of each node in use, and their links and NICs.

        Raises:
            ConfigError: A node has fewer ranks.
        """
        if ranks_per_node == self.ranks_per_node:
            return self
        if not 1 <= ranks_per_node <= self.ranks_per_node:
            raise ConfigError(
                f"ranks_per_node = {ranks_per_node}: a node of cluster {self.name} has {self.ranks_per_node} ranks; "
                f"valid: 1 to {self.ranks_per_node}, or a cluster file with another ranks_per_node"
            )
        rank_bandwidth = self.rank_bandwidth
        if self.fabric == "mesh":
            rank_bandwidth = min(rank_bandwidth, self.pair_bandwidth * max(1, ranks_per_node - 1))
        return self.with_values(
            ranks_per_node=ranks_per_node,
            rank_bandwidth=rank_bandwidth,
            nics_per_node=self.nic_of(ranks_per_node - 1) + 1,
        )


#: Presets of machines, by what their names have in common.
_MACHINES = {
    "superpod": "a3_superpod", "a2": "a2", "910b": "a2", "a3": "a3", "910c": "a3", "950": "a950", "a100": "a800",
    "h100": "h800",
}  # fmt: skip


def cluster_names() -> list[str]:
    """Return the names of the installed presets, sorted."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Load a preset by name, such as "a2", or a YAML file with the same keys.

    Raises:
        ConfigError: The preset or file does not exist (the message lists the presets), or a key is missing, unknown or
            out of range (the message gives file and line).
    """
    check_type("cluster", name_or_path, (str, Path), f"{', '.join(cluster_names())}, or the path of a YAML file")
    text = str(name_or_path)
    if isinstance(name_or_path, str) and text in cluster_names():
        return _preset(text)
    path = Path(name_or_path)
    if isinstance(name_or_path, str) and path.suffix not in (".yaml", ".yml") and path.name == text:
        names = cluster_names()
        near = [name for part, name in _MACHINES.items() if part in text.lower()] or closest_names(text.lower(), names)
        raise ConfigError(
            f"cluster {text!r}: no such preset; {did_you_mean(near)}"
            f"valid: {', '.join(names)}, or the path of a YAML file with the keys of a preset"
        )
    if not path.is_file():
        valid = f"the path of a YAML file with the keys of a preset, or {', '.join(cluster_names())}"
        raise ConfigError(f"cluster {text}: no such file; valid: {valid}")
    return _read(path)


@lru_cache
def _preset(name: str) -> Cluster:
    return _read(PRESET_FOLDER / f"{name}.yaml")


def _read(path: Path) -> Cluster:
    file = read_settings_file(path)
    return with_file_location(file, "", lambda: Cluster(**file.data))


def cluster_of(topology: Topology) -> Cluster:
    """Return the cluster that a topology runs on, its nodes cut to the topology's ranks.

    A file is read once per process, so that all plans of a run use the same figures.

    Raises:
        ConfigError: The cluster does not exist, or its nodes have fewer ranks.
    """
    check_type("topology", topology, Topology, "Topology(...)")
    return _cluster_of(topology)


@lru_cache(maxsize=64)
def _cluster_of(topology: Topology) -> Cluster:
    cluster = load_cluster(DEFAULT_CLUSTER if topology.cluster is None else topology.cluster)
    ranks_per_node = topology.ranks_per_node
    if ranks_per_node <= cluster.ranks_per_node:
        return cluster.with_ranks(ranks_per_node)
    if topology.cluster is None:  # no such nodes are known: assume the same links, and a NIC for each rank
        rank_bandwidth = cluster.pair_bandwidth * (ranks_per_node - 1)
        return cluster.with_values(
            ranks_per_node=ranks_per_node, rank_bandwidth=rank_bandwidth, nics_per_node=ranks_per_node
        )
    raise ConfigError(
        f"cluster is {topology.cluster!r}, whose nodes have {cluster.ranks_per_node} ranks, but the topology has "
        f"{ranks_per_node} on a node; valid: at most as many, on more nodes, or a file with ranks_per_node and links "
        "of your own"
    )
