"""One factor between the time of a real cluster and the time of its emulation.

The emulation moves the same rows as the real cluster, of the same lengths, over the same links; but a row is narrower
(`wire_dim` channels for each head in place of head_dim) and a NIC slower. So a transfer takes ::

    seconds = (wire_dim / head_dim) * (effective bandwidth of the preset's NIC / rate of the emulated NIC)

times as long as the real one would, and modelled kernels and in-node links are slowed down by just that factor: the
ratio of compute to communication, and of in-node to network, is the preset's. Latencies are not emulated: those of the
emulation (gloo, scheduling of processes) are what they are, so the factor should be large (10 and more).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.cluster.network import MTU, Shape
from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.cluster import Cluster, load_cluster
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.errors import ConfigError

#: Share of a NIC's bits that are rows: Ethernet, IP and TCP headers take 54 bytes of each packet.
PAYLOAD = (MTU - 40) / (MTU + 14)

IN_NODE = ("preset", "free", "mesh", "switch")


@dataclass(frozen=True)
class Scale:
    """What is emulated, and how much slower.

    Attributes:
        preset: name of a cluster, or a file.
        ranks_per_node: of an emulated node: so many of a real one's.
        attention: of the real layer.
        wire_dim: channels of a head of the rows that really travel; head_dim_v is scaled alike.
        nic_rate: bits/second of an emulated NIC.

    Raises:
        ConfigError: there is no such preset, or its nodes have fewer ranks; wire_dim is no part of head_dim and
            head_dim_v; or the rate is below 1 Mbit/s.
    """

    preset: str
    ranks_per_node: int
    attention: AttentionConfig
    wire_dim: int
    nic_rate: int

    def __post_init__(self) -> None:
        _ = self.cluster  # is there
        a, n = self.attention, self.wire_dim
        if n < 1 or a.head_dim % n or a.head_dim_v * n % a.head_dim:
            raise ConfigError(
                f"--wire-dim is {n}; valid: a divisor of head_dim = {a.head_dim} that scales head_dim_v = "
                f"{a.head_dim_v} to a whole number"
            )
        if self.nic_rate < 1_000_000:
            raise ConfigError(f"--rate is {self.nic_rate / 1e6:g} Mbit/s; valid: 1 or more")

    @cached_property
    def cluster(self) -> Cluster:
        """The preset, its nodes cut to the ranks of an emulated one: with the links among these and their NICs. Posting
        is real there, and takes no modelled time."""
        return load_cluster(self.preset).with_ranks(self.ranks_per_node).with_values(posting=0.0)

    @property
    def seconds(self) -> float:
        """Emulated seconds for a real one."""
        emulated = self.nic_rate / 8 * PAYLOAD
        return self.wire_dim / self.attention.head_dim * self.cluster.effective_nic / emulated

    @property
    def wire(self) -> AttentionConfig:
        """The attention of the rows that really travel."""
        a = self.attention
        return replace(
            a, head_dim=self.wire_dim, head_dim_v=a.head_dim_v * self.wire_dim // a.head_dim, scale=a.softmax_scale
        )

    def shape(self, nodes: int, in_node: str) -> Shape:
        """Return the network.

        Args:
            nodes: of the cluster.
            in_node: "preset": the preset's fabric and its bandwidth, scaled; "mesh", "switch": that fabric with the
                preset's bandwidth of a pair; "free": without limits.
        """
        if in_node not in IN_NODE:
            raise ConfigError(f"--in-node is {in_node!r}; valid: {', '.join(IN_NODE)}")
        c = self.cluster
        rate = round(self.nic_rate * c.pair_bandwidth / c.nic_bandwidth)
        fabric = {"preset": c.fabric, "free": "switch"}.get(in_node, in_node)
        limit = None if in_node == "free" else rate
        return Shape(nodes, c.ranks_per_node, c.nics_per_node, self.nic_rate, fabric, limit)

    def topology(self, nodes: int) -> Topology:
        """Return the ranks, as a planner sees them."""
        return Topology(nodes, self.cluster.ranks_per_node, self.preset)

    def told(self, nodes: int, in_node: str) -> str:
        """Return a description of the setting in a few lines."""
        c, a, shape = self.cluster, self.attention, self.shape(nodes, in_node)
        links = "no limit" if shape.link_rate is None else _megabits(shape.link_rate)
        kind = "a link for each pair" if shape.fabric == "mesh" else "a port for each rank"
        return (
            f"preset {c.name}: {nodes} nodes x {c.ranks_per_node} ranks, {shape.nics} NICs in a node of "
            f"{_megabits(shape.nic_rate)} each way; in a node {kind}, {links}\n"
            f"attention {a.heads} heads, {a.kv_heads} kv heads x {a.head_dim}; rows that travel have {self.wire_dim} "
            f"channels a head\n"
            f"one second of the real cluster is {self.seconds:.1f} s here (NIC: {c.nic_bandwidth / 1e9:g} GB/s x "
            f"{c.communication_efficiency:g})"
        )


def _megabits(rate: int) -> str:
    """Return a rate in words."""
    return f"{rate / 1e6:.{0 if rate >= 10e6 else 2}f} Mbit/s"


# The plans that are compared, and the batches that they are made for.


BASE = "even-split ring"

#: Name -> algorithm and options. "ranks" and "ranks_per_node" stand for those of the cluster.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    BASE: ("ring", {}),
    "all_gather": ("all_gather", {}),
    "Ulysses+ring": ("hybrid", {"ulysses_degree": "ranks_per_node"}),
    "direct, balanced, all at once": ("direct", {"layout": "balanced", "prefetch": "ranks"}),
    "hierarchical + routing": ("hierarchical", {"routing": True, "remap": "off"}),
}


@dataclass(frozen=True)
class Batch:
    """Documents that one layer computes at a time.

    Attributes:
        name: of the set that they were drawn from.
        number: in the set.
        lengths: in tokens.
    """

    name: str
    number: int
    lengths: tuple[int, ...]


def batches_of(name: str, count: int, tokens: int, folder: Path | None = None, seed: int = 0) -> list[Batch]:
    """Return the batches of a set.

    Args:
        name: "one": a single document; else as for :func:`mindspeed_cp.data.lengths.sample_batch`.
        count: of batches; one document is one batch.
        tokens: of a batch.
        folder: of real lengths; None: they are drawn from the project's own bins.
        seed: of the first batch; the next number is that of the next.
    """
    if name == "one":
        return [Batch("one", 0, (tokens,))]
    drawn = [sample_batch(name, tokens, seed + number, folder=folder) for number in range(count)]
    return [Batch(name, number, tuple(lengths.tolist())) for number, lengths in enumerate(drawn)]


def plan_for(name: str, batch: Batch, scale: Scale, nodes: int) -> Plan:
    """Return the plan of a variant, decided for the real layer.

    Raises:
        ConfigError: this version does not have its algorithm, or an option of it.
    """
    algorithm, options = VARIANTS[name]
    topology = scale.topology(nodes)
    numbers = {"ranks": topology.ranks, "ranks_per_node": topology.ranks_per_node}
    given: dict[str, Any] = {
        key: numbers[value] if isinstance(value, str) and value in numbers else value for key, value in options.items()
    }
    return build_plan(Documents(list(batch.lengths)), topology, scale.attention, algorithm, **given)


def narrowed(plan: Plan, scale: Scale) -> Plan:
    """Return the same plan for the narrower rows that really travel: the same rows, tiles and messages."""

    wire = scale.wire
    return replace(
        plan,
        attention=wire,
        forward=replace(plan.forward, attention=wire),
        backward=replace(plan.backward, attention=wire),
        parts=tuple(narrowed(part, scale) for part in plan.parts),
    )
