"""One pool of all ranks, or several under a level that assigns documents to them: time of planning and of a layer.

    python -m benchmarks.pool_levels [--ranks 1024] [--pools 1 2 4 8] [--lengths wikipedia prolong]
                                     [--heads mha gqa8] [--tokens 4096] [--cluster a800]

Documents go to pools as in a training (mindspeed_cp/data/subpools.py); every pool is planned by itself as a plan
without options is, and the layer of all takes as long as that of the slowest pool. Planning: CPU seconds of one process
for all pools, one after the other. Layers, forward and backward, are modelled: fraction of the bound (perfect balance
over all ranks, nothing exposed). Batch 0 of set s is drawn by default_rng([0, s, 0]), as in benchmarks.scale.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks.data import HEADS
from benchmarks.length_sets import SETS
from benchmarks.topologies import place_of
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.data.document_cost import DocumentCost
from mindspeed_cp.data.subpools import assign_to_pools
from mindspeed_cp.simulate.simulator import simulate_plan


def planned(lengths: np.ndarray, topology: Topology, attention: AttentionConfig, pools: int) -> tuple[float, float]:
    """Return the CPU seconds of planning, and the modelled seconds of a layer.

    Args:
        lengths: of all documents, int64 [documents].
        topology: all ranks.
        attention: attention of the layer.
        pools: number of pools, each of whole nodes; 1: no level above.
    """
    began = time.process_time()
    cost = DocumentCost(cluster_of(topology), [(attention, LayerCost.for_attention(attention))], whole_documents=True)
    members = assign_to_pools(lengths, cost(lengths), pools, pools, context=int(lengths.sum())).micro_batches
    pool = Topology(topology.nodes // pools, topology.ranks_per_node, topology.cluster)
    plans = [build_plan(Documents(lengths[numbers]), pool, attention, "hierarchical") for (numbers,) in members]
    seconds = time.process_time() - began
    return seconds, max(simulate_plan(plan, cluster_of(pool)).total for plan in plans)


def main() -> None:
    """Print a line for each batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--pools", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--lengths", nargs="+", choices=SETS, default=["wikipedia", "prolong"])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--cluster", default="a800")
    arguments = parser.parse_args()
    topology = place_of(arguments.cluster, arguments.ranks)
    for pools in arguments.pools:
        if pools < 1 or topology.nodes % pools:
            parser.error(f"--pools {pools}: there are {topology.nodes} nodes; valid: its divisors")
    print(f"{'lengths':12}{'heads':7}" + "".join(f"{f'{n} pools':>24}" for n in arguments.pools))
    for name in arguments.lengths:
        lengths = SETS[name](
            arguments.ranks * arguments.tokens, arguments.ranks, np.random.default_rng([0, list(SETS).index(name), 0])
        )
        for heads in arguments.heads:
            attention, documents = HEADS[heads], Documents(lengths)
            figures = [planned(lengths, topology, attention, pools) for pools in arguments.pools]
            bound = choose_placement(documents, documents, topology, attention).bound  # at last: searches are cached
            cells = [f"{bound / layer:.3f}, {seconds:.2f} s" for seconds, layer in figures]
            print(f"{name:12}{heads:7}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
