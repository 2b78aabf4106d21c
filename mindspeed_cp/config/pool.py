"""The topology of the pool of data.balance: pool."""

from __future__ import annotations

from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.config.data import POOL
from mindspeed_cp.config.suite import SuiteSettings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import RANK_LIMIT, Topology
from mindspeed_cp.schema.messages import bad_value

KEY = "data.balance"


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
