"""What a plan costs: what a cluster's devices and links can do, and the seconds of its kernels.  NumPy only."""

from mindspeed_cp.cost.cluster import Cluster, cluster_names, load_cluster
from mindspeed_cp.cost.compute import ComputeCost, LayerCost
from mindspeed_cp.cost.lengths import Lengths, length_names, load_lengths, sample_batch, sample_lengths

__all__ = [
    "Cluster",
    "ComputeCost",
    "LayerCost",
    "Lengths",
    "cluster_names",
    "length_names",
    "load_cluster",
    "load_lengths",
    "sample_batch",
    "sample_lengths",
]
