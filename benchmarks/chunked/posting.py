"""Modelled seconds of a layer in which posting messages takes time, too."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cluster import Cluster, ComputeCost
from mindspeed_cp.plan.program import DIRECTIONS, Plan
from mindspeed_cp.plan.transfers import step_count, transfers
from mindspeed_cp.simulate.linear_times import linear_times, with_projections
from mindspeed_cp.simulate.link_queues import LinkQueues
from mindspeed_cp.simulate.simulator import simulate_direction
from mindspeed_cp.simulate.tile_work import COARSE_SPANS, TileCounter, representative_ranks


def layer_seconds(plan: Plan, cluster: Cluster, posting: tuple[float, ...] = (0.0,)) -> list[float]:
    """Return the modelled seconds of a layer, forward and backward, as :func:`mindspeed_cp.simulate_plan` does, for
    several costs of posting.

    Args:
        plan: any plan.
        cluster: its nodes have as many ranks as the plan's.
        posting: seconds in which a rank computes nothing, for each part of which it posts messages in a step. The
            simulator has 0: a message there costs its latency, a kernel call its launch.
    """
    cost = ComputeCost(cluster, plan.attention)
    tiles = TileCounter(plan, representative_ranks(plan, COARSE_SPANS))
    kernels = {way: tiles.work(way).seconds(cost, way == "backward") for way in DIRECTIONS}
    tables = {
        way: transfers(plan, way, cost.layer.bytes_per_element, cost.layer.hidden_row_bytes) for way in DIRECTIONS
    }
    linear = {way: linear_times(plan, cost, way == "backward") for way in DIRECTIONS}
    out = []
    for seconds in posting:
        begin = np.zeros(plan.ranks)
        for way in DIRECTIONS:
            computed = with_projections(kernels[way], linear[way], plan) + seconds * _posts(plan, way, tables[way])
            links = LinkQueues(cluster, plan.topology.nodes)
            steps, _ = simulate_direction(computed, tables[way], links, begin)
            begin = steps[:, -1, 2] + sum(linear[each].rest for each in DIRECTIONS)
        out.append(float(steps[:, -1, 2].max()))
    return out


def _posts(plan: Plan, direction: str, table: np.ndarray) -> np.ndarray:
    """Return of how many parts each rank posts messages in each step, int64 [ranks, timeline steps]."""
    parts, steps = len(plan.parts_or_self), step_count(plan, direction)
    posted = np.zeros((plan.ranks, steps, parts), bool)
    for end in ("src", "dst"):
        posted[table[end], table["start"], table["part"]] = True
    return posted.sum(2)
