"""The cluster that is fitted to the measurements, and the times that the simulator expects on it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.choose.compare import Comparison, SimulationCase, compare_algorithms
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.cluster.assemble import assemble_cluster, write_preset
from mindspeed_cp.cluster.cluster import Cluster
from mindspeed_cp.cluster.measurements import MeasuredFits, Measurement
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology


def fit_cluster(
    measurements: Sequence[dict[str, Any]], ranks_per_node: int, memory: float, title: str
) -> tuple[Cluster, dict[str, Any]]:
    """Fit a cluster.

    Args:
        measurements: fields of Measurement, of kernels and of links.
        ranks_per_node: ranks of a node.
        memory: bytes of the device of a rank.
        title: first line of its file.

    Returns:
        The cluster, and {"values", "sources", "fits", "text"}: its values, the source and the fit of each, its file.

    Raises:
        ConfigError: the measurements determine no cluster.
    """
    fits = MeasuredFits.from_measurements([Measurement(**row) for row in measurements], ranks_per_node)
    if fits.in_node is None and fits.network is not None:  # nodes of one rank have no links inside
        in_node = dataclasses.replace(fits, in_node=fits.network)
        cluster, sources = assemble_cluster("fitted", in_node, ranks_per_node=ranks_per_node, memory=memory)
        in_node_keys = ("fabric", "pair_bandwidth", "rank_bandwidth", "in_node_latency")
        sources |= dict.fromkeys(in_node_keys, "between nodes: a node has one rank")
    else:
        cluster, sources = assemble_cluster("fitted", fits, ranks_per_node=ranks_per_node, memory=memory)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.yaml")
        write_preset(path, cluster, sources, title)
        text = path.read_text(encoding="utf-8")
    return cluster, {
        "values": dataclasses.asdict(cluster), "sources": sources, "fits": fits.table(), "text": text,
    }  # fmt: skip


def simulate_batch(
    lengths: list[int], topology: Topology, cluster: Cluster, attention: AttentionConfig, element: int, source: str
) -> Comparison:
    """Simulate all algorithms on a batch: attention alone, forward and backward.

    Args:
        lengths: documents of the batch.
        topology: ranks; its cluster is the file by which algorithms decide.
        cluster: speeds of the simulation.
        attention: attention.
        element: bytes of an element.
        source: name of the batch.

    Raises:
        ConfigError: the even ring cannot run the batch.
    """
    layer = LayerCost(0.0, attention.heads * attention.head_dim, bytes_per_element=element)
    case = SimulationCase((Documents(lengths),), topology, attention, cluster, layer, source)
    return compare_algorithms(case, [Candidate(name) for name in ALGORITHMS])
