"""Time of a training's choice between replicas, one pool of all ranks and several, and of the plan that follows.

    python -m benchmarks.pool_choice [--ranks 1024 4096] [--replica 8] [--pool-ranks 1024] [--batches 1]
                                     [--lengths wikipedia prolong] [--heads gqa8] [--tokens 4096] [--cluster a800]

What every rank of a training with `data.balance: pool` does for a step: the choice, then the plan of its own pool, both
under the default bound of tokens on a rank. The rows of a step are full, one of each replica; its documents are cut at
their ends, in the order in which they are drawn.
CPU seconds of one process are measured. Batch i of set s is drawn by default_rng([i, s, 0]), as in benchmarks.scale.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from math import ceil

import numpy as np

from benchmarks.data import HEADS
from benchmarks.length_sets import SETS
from benchmarks.topologies import place_of
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.config.derived import TOKENS_OVER_MEAN
from mindspeed_cp.config.pool import replicas_of_pool
from mindspeed_cp.config.suite import TOKEN_CAP_OPTION
from mindspeed_cp.data import Dispatcher, PoolModel
from mindspeed_cp.data.document_cost import DocumentCost
from mindspeed_cp.data.packing import DOC_CHUNK
from mindspeed_cp.data.pool import POOL_ALGORITHM
from mindspeed_cp.errors import ConfigError


@dataclass(frozen=True)
class Chosen:
    """Figures of a step.

    Attributes:
        documents: number of documents, cut at the ends of rows.
        pools: number of pools of the step; 0: replicas.
        choosing, planning: CPU seconds of the choice, and of the plan of the pool or replica with least work, whose
            search the choice has not made before if there are several.
    """

    documents: int
    pools: int
    choosing: float
    planning: float


def full_rows(lengths: np.ndarray, rows: int) -> list[np.ndarray]:
    """Return documents in full rows of equal lengths, cut at their ends, DOC_CHUNK [chunks] each.

    Args:
        lengths: tokens of each document, int64 [documents]; all together a multiple of `rows`.
        rows: number of rows.
    """
    context = int(lengths.sum()) // rows
    ends = np.cumsum(lengths)
    borders = np.unique(np.concatenate([[0], ends, np.arange(1, rows + 1) * context]))
    chunks = np.zeros(len(borders) - 1, DOC_CHUNK)
    chunks["length"] = np.diff(borders)
    chunks["document"] = np.searchsorted(ends, borders[:-1], side="right")
    chunks["start"] = borders[:-1] - (ends - lengths)[chunks["document"]]
    return np.split(chunks, np.searchsorted(borders[:-1], np.arange(1, rows) * context))


def choose(rows: list[np.ndarray], replica: Topology, attention: AttentionConfig, pool_ranks: int) -> Chosen:
    """Choose for a step, and plan it.

    Args:
        rows: one of each replica.
        replica: ranks of a replica, whole nodes.
        attention: attention of a layer.
        pool_ranks: data.pool_ranks.
    """
    cluster, layer, replicas = cluster_of(replica), LayerCost.for_attention(attention), len(rows)
    context = int(rows[0]["length"].sum())
    options = {TOKEN_CAP_OPTION: ceil(TOKENS_OVER_MEAN * context / replica.ranks)}
    pools = replicas // replicas_of_pool(replica.ranks, replicas, pool_ranks, replica.ranks_per_node)
    whole, part = (Topology(replica.nodes * replicas // n, replica.ranks_per_node, replica.cluster) for n in (1, pools))
    cost = DocumentCost(cluster, [(attention, layer)], replica.ranks, whole_documents=True)
    model = PoolModel(replica, whole, attention, layer, options=options, subpool=part if pools > 1 else None)
    dispatcher = Dispatcher("pool", replicas, context, cost, cost.per_micro_batch, pool=model)
    began = time.process_time()
    batch = dispatcher(rows)
    chosen = time.process_time()
    topology = {0: replica, 1: whole}.get(batch.pools, part)
    for numbers in batch.micro_batches[int(batch.seconds.argmin())]:
        build_plan(Documents(batch.chunks["length"][numbers]), topology, attention, POOL_ALGORITHM, **options)
    return Chosen(len(batch.chunks), batch.pools, chosen - began, time.process_time() - chosen)


def main() -> None:
    """Print a line for each batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--replica", type=int, default=8, help="ranks of a replica")
    parser.add_argument("--pool-ranks", type=int, default=1024, help="data.pool_ranks")
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--lengths", nargs="+", choices=SETS, default=["wikipedia", "prolong"])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=["gqa8"])
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--cluster", default="a800")
    arguments = parser.parse_args()
    replica = place_of(arguments.cluster, arguments.replica)
    node = cluster_of(replica).ranks_per_node
    if replica.ranks % node:
        parser.error(f"--replica {arguments.replica}: valid: a multiple of {node}, the ranks of a node")
    print(f"{'lengths':12}{'heads':7}{'ranks':>6}{'documents':>11}{'pools':>7}{'choice, s':>11}{'plan, s':>9}")
    for ranks in arguments.ranks:
        if ranks < 1 or ranks % replica.ranks:
            parser.error(f"--ranks {ranks}: valid: a multiple of {replica.ranks}, the ranks of a replica")
        try:
            replicas_of_pool(replica.ranks, ranks // replica.ranks, arguments.pool_ranks, replica.ranks_per_node)
        except ConfigError as error:
            parser.error(f"--pool-ranks: {error}")
        for name in arguments.lengths:
            for number in range(arguments.batches):
                draw = np.random.default_rng([number, list(SETS).index(name), 0])
                rows = full_rows(SETS[name](ranks * arguments.tokens, ranks, draw), ranks // replica.ranks)
                for heads in arguments.heads:
                    figures = choose(rows, replica, HEADS[heads], arguments.pool_ranks)
                    print(
                        f"{name:12}{heads:7}{ranks:6}{figures.documents:11,}{figures.pools:7}"
                        f"{figures.choosing:11.2f}{figures.planning:9.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
