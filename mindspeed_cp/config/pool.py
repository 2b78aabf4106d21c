"""The topology of the pool of data.balance: pool, or of each of several (data.pool_ranks)."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.config.data import POOL
from mindspeed_cp.config.suite import SuiteSettings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import RANK_LIMIT, Topology
from mindspeed_cp.schema.messages import bad_value

KEY, RANKS_KEY = "data.balance", "data.pool_ranks"


@dataclass(frozen=True)
class Subpools:
    """Equal pools of whole, consecutive replicas.

    Attributes:
        count: number of pools.
        topology: context-parallel ranks of each, numbered replica by replica.
    """

    count: int
    topology: Topology


def replicas_of_pool(context_parallel: int, replicas: int, limit: int, per_node: int = 1) -> int:
    """Return the number of replicas of each of the fewest equal pools of at most `limit` ranks.

    Args:
        context_parallel: ranks of a replica.
        replicas: number of data-parallel replicas.
        limit: data.pool_ranks.
        per_node: context-parallel ranks of a node, of all replicas; a pool has whole nodes, or a node whole pools.

    Raises:
        SettingError: there are more ranks than `limit`, and no such pool has two replicas.
    """
    if replicas == 1 or context_parallel * replicas <= limit:
        return replicas
    sizes = [
        count
        for count in range(2, replicas + 1)
        if replicas % count == 0
        and (context_parallel * count % per_node == 0 or per_node % (context_parallel * count) == 0)
    ]
    fitting = [count for count in sizes if context_parallel * count <= limit]
    if fitting:
        return fitting[-1]
    nodes = f", and of whole nodes of {per_node} ranks or equally many on a node" if per_node > 1 else ""
    rule = (
        f"must be {context_parallel * min(sizes, default=replicas)} or more with {replicas} replicas of "
        f"context_parallel_size {context_parallel}, because pools are of equally many whole replicas, at least 2"
        f"{nodes}; or use another number of replicas"
    )
    raise bad_value(RANKS_KEY, limit, rule)


def subpools_of(suite: SuiteSettings, replicas: int, pool: Topology, limit: int) -> Subpools | None:
    """Return the pools into which the pool of all ranks is divided, or None if it has no more ranks than `limit`.

    Args:
        suite: the section context_parallel_suite.
        replicas: number of data-parallel replicas.
        pool: result of `pool_topology`.
        limit: data.pool_ranks.

    Raises:
        SettingError: as for `replicas_of_pool`.
    """
    count = replicas_of_pool(suite.context_parallel_size, replicas, limit, pool.ranks_per_node)
    if count == replicas:
        return None
    ranks = suite.context_parallel_size * count
    per_node = min(ranks, pool.ranks_per_node)
    return Subpools(replicas // count, Topology(ranks // per_node, per_node, suite.cluster))


def pool_topology(suite: SuiteSettings, replicas: int, local_ranks: int, tensor: int, key: str = KEY) -> Topology:
    """Return the context-parallel ranks of all replicas of a pipeline stage, numbered replica by replica.

    Several replicas may share a machine, or each has several machines (context_parallel_suite.nodes).

    Args:
        suite: the section context_parallel_suite.
        replicas: number of data-parallel replicas.
        local_ranks: number of ranks on each machine.
        tensor: tensor-parallel ranks.
        key: the setting that asks for a pool, for errors.

    Raises:
        ConfigError: machines would hold different numbers of whole replicas, or the cluster has no such nodes.
    """
    ranks = suite.context_parallel_size * replicas
    per_node = suite.topology.ranks_per_node
    if suite.nodes == 1:
        per_node = min(ranks, max(per_node, local_ranks // tensor))
        if per_node % suite.context_parallel_size or ranks % per_node:
            rule = (
                f"needs equally many whole replicas on every machine, and {local_ranks} ranks of a machine with "
                f"tensor_model_parallel_size {tensor} hold {per_node} of the {ranks} ranks of {replicas} replicas of "
                f"context_parallel_size {suite.context_parallel_size}; start other numbers of ranks, or leave the pool "
                "out"
            )
            raise bad_value(key, POOL, rule)
    if ranks > RANK_LIMIT:
        rule = f"makes a pool of {ranks} ranks, and a plan has at most {RANK_LIMIT}; leave the pool out"
        raise bad_value(key, POOL, rule)
    topology = Topology(ranks // per_node, per_node, suite.cluster)
    try:
        cluster_of(topology)
    except ConfigError as error:
        rule = (
            f"makes nodes of {per_node} ranks, which context_parallel_suite.cluster cannot be: {error}; or leave the "
            "pool out"
        )
        raise bad_value(key, POOL, rule) from None
    return topology
