"""Simulation of a plan of states on a cluster: its messages on the links, its products and chunks on the ranks.

Seconds are modelled: a chunked forward has some 10 dk dv FLOPs a token and head, the maps of segments that others need
another 4 dk dv for H and 4 dk^2 for M (facts of the chunked algorithm, Yang et al. 2412.06464), at the rate of linear
layers; products of states and maps run in fp32, at a quarter of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cluster.cluster import Cluster, load_cluster
from mindspeed_cp.plan.states import COMPOSE, PULL, STATE_BYTES, StatePlan, StateProgram
from mindspeed_cp.plan.transfers import KEYS, REDISTRIBUTION, TRANSFER
from mindspeed_cp.simulate.link_queues import LinkQueues
from mindspeed_cp.simulate.simulator import simulate_direction

#: FLOPs of a token and head, in units of dk * dv, of the forward, and of the backward, which recomputes the forward.
FORWARD, BACKWARD = 10.0, 30.0

FP32_SHARE = 0.25  # of the rate of linear layers, for products in fp32


@dataclass(frozen=True, eq=False)
class StateTimes:
    """Modelled seconds of one layer's states.

    Attributes:
        forward, backward: until the last rank is done.
        compute: seconds of each rank's kernels, both directions, fp64 [ranks].
        received: bytes that each rank receives in both directions, fp64 [ranks].
    """

    forward: float
    backward: float
    compute: np.ndarray
    received: np.ndarray

    @property
    def total(self) -> float:
        """Both directions."""
        return self.forward + self.backward


def state_transfers(plan: StatePlan, direction: str, bytes_per_element: int = 2) -> np.ndarray:
    """Return the messages of a direction, records of dtype TRANSFER sorted by `start`.

    Timeline step 0 waits for rows that move to a layout of heads, step 1 computes maps, steps 2 + 2 s and 3 + 2 s are
    the messages and the operations of step s, and then come the outputs, and their way back.

    Args:
        plan: any plan of states.
        direction: "forward" or "backward".
        bytes_per_element: of q, k, v and the output; gates and beta travel in fp32.
    """
    program: StateProgram = getattr(plan, direction)
    messages = program.messages
    key = (messages["step"] * plan.ranks + messages["src"]) * plan.ranks + messages["dst"]
    _, first, pair = np.unique(key, return_index=True, return_inverse=True)
    out = np.zeros(len(first), TRANSFER)  # what goes to one rank in a step is one message
    for name in ("src", "dst"):
        out[name] = messages[name][first]
    out["start"] = out["done"] = 2 + 2 * messages["step"][first]
    out["kind"] = KEYS
    out["bytes"] = np.bincount(pair.reshape(-1), plan.state.bytes_of(messages["parts"]), len(first))
    if plan.redistribution is None:
        return out
    state, pairs = plan.state, plan.redistribution.remote_pairs
    gates = STATE_BYTES * (1 + (state.head_dim if state.has_channel_gates else 1))
    inward = bytes_per_element * (2 * state.head_dim + state.head_dim_v) + gates
    outward = bytes_per_element * state.head_dim_v
    tables = [out]
    for step, adjoint in ((0, False), (3 + 2 * program.steps, True)):
        moved = np.zeros(len(pairs), TRANSFER)
        moved["src"], moved["dst"] = pairs["dst" if adjoint else "src"], pairs["src" if adjoint else "dst"]
        moved["start"] = moved["done"] = step
        moved["kind"] = REDISTRIBUTION
        row = inward if adjoint == (direction == "backward") else outward
        moved["bytes"] = pairs["rows"] * pairs["heads"] * float(row)
        tables.append(moved)
    both = np.concatenate(tables)
    return both[np.argsort(both["start"], kind="stable")]


def simulate_states(plan: StatePlan, cluster: Cluster | str, bytes_per_element: int = 2) -> StateTimes:
    """Simulate the forward and the backward of one layer's states.

    Args:
        plan: any plan of states.
        cluster: its nodes need at least `plan.topology.ranks_per_node` ranks; or a preset's name, or a YAML file.
        bytes_per_element: as for :func:`state_transfers`.

    Raises:
        ConfigError: the cluster's nodes have fewer ranks than the plan's, or there is no such cluster.
    """
    cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    cluster = cluster.with_ranks(plan.topology.ranks_per_node)
    seconds, compute, received = [], np.zeros(plan.ranks), np.zeros(plan.ranks)
    for direction in ("forward", "backward"):
        kernels = _kernels(plan, direction, cluster)
        table = state_transfers(plan, direction, bytes_per_element)
        steps, _ = simulate_direction(kernels, table, LinkQueues(cluster, plan.topology.nodes), np.zeros(plan.ranks))
        seconds.append(float(steps[:, -1, 2].max()))
        compute += kernels.sum(1)
        received += np.bincount(table["dst"], table["bytes"], plan.ranks)
    return StateTimes(seconds[0], seconds[1], compute, received)


def _kernels(plan: StatePlan, direction: str, cluster: Cluster) -> np.ndarray:
    """Return the seconds that each rank computes in each timeline step, fp64 [ranks, steps]."""
    state, segments = plan.state, plan.segments
    program: StateProgram = getattr(plan, direction)
    rate = cluster.peak_flops * cluster.linear_efficiency
    heads = plan.compute_layout.head_counts(state.heads)
    tokens, size = segments["stop"] - segments["start"], float(state.head_dim * state.head_dim_v)
    out = np.zeros((plan.ranks, 4 + 2 * program.steps))
    if direction == "forward":
        with_map = plan.carried & (segments["before"] >= 0) & state.has_delta
        each = tokens * (plan.carried * 4 * size + with_map * 4.0 * state.head_dim**2)
        out[:, 1] = np.bincount(segments["rank"], each, plan.ranks) * heads / rate
    whole = FORWARD if direction == "forward" else BACKWARD
    out[:, -2] += plan.compute_layout.token_counts * heads * whole * size / rate
    operations, columns = program.operations, state.head_dim if state.has_delta else 1
    products = np.isin(operations["kind"], (COMPOSE, PULL))
    seconds = cluster.launch + products * 2 * size * columns * heads[operations["rank"]] / (rate * FP32_SHARE)
    np.add.at(out, (operations["rank"], 3 + 2 * operations["step"]), seconds)
    return out
