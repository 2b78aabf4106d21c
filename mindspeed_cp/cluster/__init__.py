"""Capabilities of a cluster: presets, links, seconds of kernels, and fits to measurements.  NumPy only."""

from mindspeed_cp.cluster.cluster import DEFAULT_CLUSTER, Cluster, KernelTime, cluster_names, cluster_of, load_cluster
from mindspeed_cp.cluster.compute import ComputeCost, LayerCost

__all__ = [
    "DEFAULT_CLUSTER",
    "Cluster",
    "ComputeCost",
    "KernelTime",
    "LayerCost",
    "cluster_names",
    "cluster_of",
    "load_cluster",
]
