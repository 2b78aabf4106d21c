"""Simulation of a plan on a cluster: the same turns, tiles and messages that the engine runs, in modelled time.

Nothing in it is measured. Every rank takes the turns of the plan one after the other, as the engine does: it posts the
turn's messages, computes its tiles on its compute stream, and waits for the messages that are due. Sends and receives
have streams of their own: a message is under way from when both its ends have posted it, beside whatever they compute.
Links are queues (:class:`mindspeed_cp.cost.links.Links`): in a mesh one for each pair and direction beside the sum of
each rank's, with a switch each rank's port; between nodes the NICs, which ranks may share. Relays are messages of the
plan as all others: a rank posts what it passes on in the turn after it has arrived.

Turns are simulated one after the other for all ranks at once. That is exact but for one thing: where ranks share a NIC,
a message of an earlier turn is served before one of a later turn that was posted before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.cost.compute import ComputeCost, LayerCost
from mindspeed_cp.cost.kernels import MOST_SPANS, TileCounter, stand_ins
from mindspeed_cp.cost.linear import LinearSeconds, linear_seconds, with_projections
from mindspeed_cp.cost.links import Links
from mindspeed_cp.cost.timeline import SPENT, Timeline
from mindspeed_cp.cost.transfers import TRANSFER, transfers, turn_count
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.program import Plan


def simulate(
    plan: Plan,
    cluster: Cluster,
    layer: LayerCost | None = None,
    most_spans: int = MOST_SPANS,
    sharing: str = "fair",
) -> Timeline:
    """The timeline of one layer: attention of the plan forward, linear layers forward and backward, attention backward.

    Args:
        plan: any plan.
        cluster: whose nodes have `plan.topology.ranks_per_node` ranks or more (:meth:`Cluster.with_ranks`).
        layer: the linear part of the layer; default: :meth:`LayerCost.like` the attention.
        most_spans: spans of keys up to which every rank's tiles are counted; beyond, some stand for their neighbours.
        sharing: how links are shared, "fair" or "fifo" (:mod:`.links`).

    Raises:
        ConfigError: the cluster's nodes have fewer ranks than the plan's, or there is no such `sharing`.
    """
    cluster = fitted(cluster, plan.topology.ranks_per_node)
    cost = ComputeCost(cluster, plan.attention, layer)
    stands = stand_ins(plan, most_spans)
    tiles = TileCounter(plan, stands)
    there, back = (linear_seconds(plan, cost, backward) for backward in (False, True))
    forward = _direction(plan, "forward", cost, np.zeros(plan.ranks), there, tiles, sharing)
    begin = forward.turns[:, -1, 2] + there.rest + back.rest
    backward = _direction(plan, "backward", cost, begin, back, tiles, sharing)
    total = float(backward.turns[:, -1, 2].max())
    compute, linear = forward.compute + backward.compute, there.total + back.total
    return Timeline(
        total,
        compute,
        linear,
        total - compute - linear,
        forward.turns,
        backward.turns,
        forward.sent,
        backward.sent,
        plan,
        cluster,
        cost.layer,
        len(np.unique(stands)),
    )


def fitted(cluster: Cluster, ranks_per_node: int) -> Cluster:
    """The cluster with that many ranks of each node in use.

    Raises:
        ConfigError: its nodes have fewer.
    """
    return cluster if cluster.ranks_per_node == ranks_per_node else cluster.with_ranks(ranks_per_node)


@dataclass(frozen=True, eq=False)
class _Direction:
    """Turns (start, computed, end) [ranks, turns, 3], attention's kernels of each rank, transfers."""

    turns: np.ndarray
    compute: np.ndarray
    sent: np.ndarray


def _direction(
    plan: Plan,
    name: str,
    cost: ComputeCost,
    begin: np.ndarray,
    linear: LinearSeconds,
    tiles: TileCounter,
    sharing: str,
) -> _Direction:
    kernels = tiles.work(name).seconds(cost, name == "backward")
    table = transfers(plan, name, cost.layer)
    if len(table) and int(table["done"].max()) >= turn_count(plan, name):
        raise ConfigError(f"plan {plan.algorithm}: a transfer is due after the last turn")
    links = Links(cost.cluster, plan.topology.nodes, sharing)
    turns, _, sent = run(with_projections(kernels, linear, plan), table, links, begin)
    return _Direction(turns, kernels.sum(1), sent)


def run(
    kernels: np.ndarray, table: np.ndarray, links: Links, begin: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One direction of any program of turns.

    Args:
        kernels: seconds that each rank computes in each turn, fp64 [ranks, turns].
        table: records of dtype TRANSFER, sorted by `start`.
        links: they serve; what they served before counts.
        begin: when each rank begins, fp64 [ranks].

    Returns:
        (start, computed, end) of every rank's turns, fp64 [ranks, turns, 3]; kernel seconds of each rank; transfers,
        records of dtype SPENT.
    """
    ranks, turns = kernels.shape
    out = np.zeros((ranks, turns, 3))
    arrived = np.zeros((ranks, turns))
    sent = np.zeros(len(table), SPENT)
    for field in TRANSFER.names or ():
        sent[field] = table[field]
    edges = np.searchsorted(table["start"], np.arange(turns + 1))
    now = np.asarray(begin, np.float64)
    for turn in range(turns):
        mine = sent[edges[turn] : edges[turn + 1]]
        if len(mine):
            src, dst, due = mine["src"], mine["dst"], mine["done"]
            mine["begin"], mine["end"] = links.serve(src, dst, mine["bytes"], np.maximum(now[src], now[dst]))
            for rank in (src, dst):
                np.maximum.at(arrived, (rank, due), mine["end"])
        out[:, turn, 0] = now
        out[:, turn, 1] = now + kernels[:, turn]
        out[:, turn, 2] = now = np.maximum(out[:, turn, 1], arrived[:, turn])
    return out, kernels.sum(1), sent
