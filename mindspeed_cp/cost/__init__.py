"""What a plan costs: what a cluster's devices and links can do, and the seconds of its kernels.  NumPy only."""

from mindspeed_cp.cost.cluster import Cluster, cluster_names, load_cluster
from mindspeed_cp.cost.compute import ComputeCost, LayerCost

__all__ = ["Cluster", "ComputeCost", "LayerCost", "cluster_names", "load_cluster"]
