"""Simulation of a plan on a cluster: the steps, tiles and messages that the engine runs, in modelled time.

Every rank runs the plan's steps in order, as the engine does: it posts the step's messages, computes its tiles on its
compute stream, and waits for the messages that are due. Each message has a launch overhead, in which the rank computes
nothing (:func:`.timeline.launch_overheads`). Messages travel in parallel with computation, from the moment at which
both ends have posted all messages of the step and all launches before theirs have ended: a rank has one stream for
messages, except in rings, where each direction of each pair has its own (`p2p_groups` of the settings). Links are
queues (:class:`.link_queues.LinkQueues`). Relayed messages are messages of the plan like all others: a rank posts them
in the step after their arrival.

Each step is simulated for all ranks at once. This is exact with two exceptions where ranks share a NIC: a message of an
earlier step is served before a message of a later step that was posted before it, and messages of a step that come at
more than 16 times are grouped (:mod:`.link_queues`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cluster.cluster import Cluster, load_cluster
from mindspeed_cp.cluster.compute import ComputeCost, LayerCost
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.runs import group_starts
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.transfers import PAIR_STREAMS, TRANSFER, edge_steps, launch_numbers, step_count, transfers
from mindspeed_cp.schema.numbers import check_type
from mindspeed_cp.simulate.link_queues import LinkQueues
from mindspeed_cp.simulate.tile_work import SIMULATED_SPANS, TileCounter, representative_ranks
from mindspeed_cp.simulate.timeline import TIMED_TRANSFER, Timeline, launch_overheads


def simulate_plan(
    plan: Plan,
    cluster: Cluster | str,
    layer: LayerCost | None = None,
    max_exact_spans: int = SIMULATED_SPANS,
) -> Timeline:
    """Simulate one layer: attention forward, linear layers forward and backward, attention backward.

    Args:
        plan: any plan.
        cluster: its nodes need at least `plan.topology.ranks_per_node` ranks; or a preset's name, or a YAML file.
        layer: linear part of the layer; default: :meth:`LayerCost.for_attention`.
        max_exact_spans: number of key spans up to which the tiles of every rank are counted; in larger plans some
            ranks represent their neighbours.

    Raises:
        ConfigError: The cluster's nodes have fewer ranks than the plan's, or there is no such cluster.
    """
    check_type("plan", plan, Plan, "what build_plan returns")
    cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    cluster = cluster.with_ranks(plan.topology.ranks_per_node)
    cost = ComputeCost(cluster, plan.attention, layer)
    representative = representative_ranks(plan, max_exact_spans)
    tiles = TileCounter(plan, representative)
    linear_forward, linear_backward = (linear_times(plan, cost, backward) for backward in (False, True))
    compute, begin = np.zeros(plan.ranks), np.zeros(plan.ranks)
    calls, in_order, results = np.zeros(plan.ranks), plan.algorithm not in PAIR_STREAMS, []
    for direction, linear in (("forward", linear_forward), ("backward", linear_backward)):
        work = tiles.work(direction)
        calls += work.calls.sum(1)
        kernels = with_projections(work.seconds(cost, direction == "backward"), linear, plan)
        table = transfers(plan, direction, cost.layer.bytes_per_element, cost.layer.hidden_row_bytes)
        if len(table) and int(table["done"].max()) >= step_count(plan, direction):
            raise ConfigError(f"plan {plan.algorithm}: a transfer is due after the last step")
        steps, timed = simulate_direction(kernels, table, LinkQueues(cluster, plan.topology.nodes), begin, in_order)
        projections = 0.0 if plan.linear_layout is None else linear.before + linear.after
        compute = compute + ((steps[:, :, 1] - steps[:, :, 0]).sum(1) - projections)
        begin = steps[:, -1, 2] + linear_forward.rest + linear_backward.rest
        results.append((steps, timed))
    (forward_steps, forward_sent), (backward_steps, backward_sent) = results
    total, linear_total = float(backward_steps[:, -1, 2].max()), linear_forward.total + linear_backward.total
    return Timeline(
        total, compute, linear_total, total - compute - linear_total, forward_steps, backward_steps, forward_sent,
        backward_sent, plan, cluster, cost.layer, calls, len(np.unique(representative)),
    )  # fmt: skip


def simulate_direction(
    kernels: np.ndarray, table: np.ndarray, links: LinkQueues, begin: np.ndarray, in_order: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Simulate one direction of any program of steps.

    Args:
        kernels: seconds that each rank computes in each step, fp64 [ranks, steps].
        table: records of dtype TRANSFER, sorted by `start`.
        links: queues that serve the messages, after what they have served before. Posting takes what their cluster
            says.
        begin: seconds at which each rank begins, fp64 [ranks].
        in_order: a rank has one stream for messages, on which its launches (`plan.transfers.launch_numbers`) are in
            order; False: messages of different launches wait for each other on links alone.

    Returns:
        (start, computed, end) of each rank's steps, fp64 [ranks, steps, 3], where launches of messages come first, and
        records of dtype TIMED_TRANSFER.
    """
    ranks, steps = kernels.shape
    out = np.zeros((ranks, steps, 3))
    arrived = np.zeros((ranks, steps))
    timed = np.zeros(len(table), TIMED_TRANSFER)
    for field in TRANSFER.names or ():
        timed[field] = table[field]
    launches = launch_overheads(table, ranks, steps, links.cluster.posting)
    numbers = launch_numbers(table) if in_order else np.searchsorted(np.unique(table["start"]), table["start"])
    order = np.argsort(numbers, kind="stable")
    first = group_starts(numbers[order])
    launches_of: dict[int, list[np.ndarray]] = {}
    for messages in np.split(order, first[1:]) if len(first) else ():
        launches_of.setdefault(int(table["start"][messages[0]]), []).append(messages)
    now = np.asarray(begin, np.float64)
    stream = np.zeros(ranks)  # seconds from which each rank's communication stream is free
    for step in range(steps):
        out[:, step, 0] = now
        now = now + launches[:, step]
        for messages in launches_of.get(step, ()):
            src, dst, done = (table[name][messages] for name in ("src", "dst", "done"))
            ready = np.maximum(now, stream)
            started, ended = links.serve(src, dst, table["bytes"][messages], np.maximum(ready[src], ready[dst]))
            timed["begin"][messages], timed["end"][messages] = started, ended
            for rank in (src, dst):
                np.maximum.at(arrived, (rank, done), ended)
                if in_order:
                    np.maximum.at(stream, rank, ended)
        out[:, step, 1] = now + kernels[:, step]
        out[:, step, 2] = now = np.maximum(out[:, step, 1], arrived[:, step])
    return out, timed


# When a rank's linear layers run: between the two directions of attention, or around attention.
#
# ::
#
#     same layout              attention forward, linear layers, attention backward
#     `Plan.linear_layout` is set     redistribution, q k v, attention, out, redistribution, other linear layers,
#                              redistribution, out, attention, q k v, redistribution
#
# In the second case projections run on the rows of attention's layout, other linear layers on those of the linear
# layout.


@dataclass(frozen=True, eq=False)
class LinearTimes:
    """Seconds of each rank's linear layers in one direction, fp64 [ranks].

    Attributes:
        before, after: projections that run before and after attention.
        rest: other linear layers: after attention in the forward, before it in the backward.
    """

    before: np.ndarray
    after: np.ndarray
    rest: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Sum of the three."""
        return self.before + self.after + self.rest


def linear_times(plan: Plan, cost: ComputeCost, backward: bool) -> LinearTimes:
    """Return the modelled seconds of a direction's linear layers."""
    rows = plan.layout.token_counts
    if plan.linear_layout is None:
        zeros = np.zeros(plan.ranks)
        return LinearTimes(zeros, zeros, cost.linear_layer_seconds(rows, backward))
    qkv, out = (cost.linear_layer_seconds(rows, backward, part) for part in ("qkv", "out"))
    rest = cost.linear_layer_seconds(plan.linear_layout.token_counts, backward, "rest")
    return LinearTimes(out, qkv, rest) if backward else LinearTimes(qkv, out, rest)


def with_projections(kernels: np.ndarray, linear: LinearTimes, plan: Plan) -> np.ndarray:
    """Add the edge steps, in which projections run, to the seconds of the plan's steps.

    Args:
        kernels: fp64 [ranks, plan steps].

    Returns:
        fp64 [ranks, timeline steps] (:func:`mindspeed_cp.plan.transfers.edge_steps`).
    """
    out = np.pad(kernels, ((0, 0), (edge_steps(plan), edge_steps(plan))))
    if plan.linear_layout is not None:
        out[:, 1], out[:, -2] = linear.before, linear.after
    return out
