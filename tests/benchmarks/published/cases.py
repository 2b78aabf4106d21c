"""Small batches and places that the tests share."""

from __future__ import annotations

from benchmarks.published.systems.even import Case
from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.cluster import load_cluster

LENGTHS = [3000, 170, 900, 1, 0, 440, 5120, 333, 64, 2000]


def case(nodes: int = 2, per_node: int = 4, cluster: str = "a800", heads: int = 8, kv_heads: int = 2) -> Case:
    """Documents of very different lengths on a few ranks."""
    attention = AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=16)
    topology = Topology(nodes, per_node, cluster)
    return Case(Documents(LENGTHS), topology, attention, load_cluster(cluster).with_ranks(per_node))
