"""Topologies of the benchmarks."""

from __future__ import annotations

from mindspeed_cp import Topology
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.errors import ConfigError


def place_of(name: str, ranks: int) -> Topology:
    """Return the topology of a number of ranks of a cluster.

    Raises:
        ConfigError: there is no such cluster, or the ranks do not make whole nodes.
    """
    per_node = min(ranks, load_cluster(name).ranks_per_node)
    if ranks % per_node:
        raise ConfigError(f"{ranks} ranks: valid for cluster {name}: up to {per_node}, or a multiple of these")
    return Topology(ranks // per_node, per_node, name)
