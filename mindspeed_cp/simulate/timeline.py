"""The modelled timeline of one layer, as returned by :func:`mindspeed_cp.simulate_plan`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.cluster.cluster import Cluster
from mindspeed_cp.cluster.compute import LayerCost
from mindspeed_cp.layout import intersect_runs, union_of_runs
from mindspeed_cp.plan.program import DIRECTIONS, Plan
from mindspeed_cp.plan.transfers import TRANSFER, step_count
from mindspeed_cp.plan.verify.memory import attention_peak_bytes

#: A transfer of a timeline: a TRANSFER record and the seconds `begin` and `end` between which it is under way.
TIMED_TRANSFER = np.dtype([*TRANSFER.descr, ("begin", np.float64), ("end", np.float64)])


@dataclass(frozen=True, eq=False)
class Timeline:
    """Modelled forward and backward of one layer on every rank, in seconds since the first rank begins.

    Attributes:
        total: seconds until the last rank is done.
        compute: attention of each rank, both directions: kernels, and the launch of messages, fp64 [ranks].
        linear: linear layers of each rank, including projections, both directions, fp64 [ranks].
        waiting: total - compute - linear: waits for messages, and for other ranks at the end, fp64 [ranks].
        steps_forward, steps_backward: (start, computed, end) of each rank's timeline steps, fp64 [ranks, steps, 3]: the
            plan steps with `edge_steps` entries before and after them (:func:`mindspeed_cp.plan.transfers.edge_steps`).
            Between the two directions a rank computes its remaining linear layers.
        transfers_forward, transfers_backward: records of dtype TIMED_TRANSFER, in the order in which they are posted.
        plan: the simulated plan.
        cluster: the cluster, with `plan.topology.ranks_per_node` ranks in use on each node.
        layer: linear part of the layer.
        calls: kernel calls of attention of each rank, both directions, fp64 [ranks].
        ranks_counted: ranks whose tiles were counted. In plans of millions of tiles some ranks represent their
            neighbours.
    """

    total: float
    compute: np.ndarray
    linear: np.ndarray
    waiting: np.ndarray
    steps_forward: np.ndarray
    steps_backward: np.ndarray
    transfers_forward: np.ndarray
    transfers_backward: np.ndarray
    plan: Plan
    cluster: Cluster
    layer: LayerCost
    calls: np.ndarray
    ranks_counted: int

    @property
    def ranks(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.compute)

    def with_fixed_costs(self, launch: float, posting: float) -> float:
        """Return about the seconds that the layer takes if a kernel call and the post of a message take so much longer:
        those of the rank that has the most of them are added to the total."""
        posts = np.zeros(self.ranks)
        for sent in (self.transfers_forward, self.transfers_backward):
            posts += np.bincount(sent["src"], minlength=self.ranks) + np.bincount(sent["dst"], minlength=self.ranks)
        return self.total + float((launch * self.calls + posting * posts).max())

    def steps(self, direction: str) -> np.ndarray:
        """Return `steps_forward` or `steps_backward`."""
        return self.steps_forward if direction == "forward" else self.steps_backward

    def transfers(self, direction: str) -> np.ndarray:
        """Return `transfers_forward` or `transfers_backward`."""
        return self.transfers_forward if direction == "forward" else self.transfers_backward

    @cached_property
    def memory(self) -> np.ndarray:
        """Peak bytes of the attention on each rank, int64 [ranks] (:mod:`mindspeed_cp.plan.verify.memory`)."""
        return attention_peak_bytes(self.plan, self.layer.bytes_per_element)

    def is_attention(self, direction: str) -> np.ndarray:
        """Mask of a direction's timeline steps in which ranks compute attention or post messages, bool [steps]; the
        others run projections."""
        out = np.ones(step_count(self.plan, direction), bool)
        if self.plan.linear_layout is not None:
            out[[1, -2]] = False
        return out

    @property
    def imbalance(self) -> float:
        """Busy seconds of the busiest rank over the mean; 1 is even, also for no work."""
        busy = self.compute + self.linear
        return float(busy.max() / busy.mean()) if busy.mean() > 0 else 1.0

    @property
    def exposed(self) -> np.ndarray:
        """Seconds in which each rank waits for messages that are due, fp64 [ranks]."""
        both = np.concatenate([self.steps_forward, self.steps_backward], 1)
        exposed: np.ndarray = (both[:, :, 2] - both[:, :, 1]).sum(1)
        return exposed

    @property
    def hidden(self) -> np.ndarray:
        """Seconds in which each rank computes attention or projections while messages reach it, fp64 [ranks]."""
        out = np.zeros(self.ranks)
        for direction in DIRECTIONS:
            transfers, steps = self.transfers(direction), self.steps(direction)
            order = np.argsort(transfers["dst"], kind="stable")
            bounds = np.searchsorted(transfers["dst"][order], np.arange(self.ranks + 1))
            for rank in range(self.ranks):
                received = transfers[order[bounds[rank] : bounds[rank + 1]]]
                begin, end = union_of_runs(np.stack([received["begin"], received["end"]], 1)).T
                _, _, first, last = intersect_runs(begin, end, steps[rank, :, 0], steps[rank, :, 1])
                out[rank] += (last - first).sum()
        return out

    @property
    def bytes_sent(self) -> np.ndarray:
        """Bytes that each rank sends in both directions, fp64 [ranks]."""
        transfers = np.concatenate([self.transfers_forward, self.transfers_backward])
        return np.bincount(transfers["src"], transfers["bytes"], self.ranks)

    def __repr__(self) -> str:
        return (
            f"Timeline({self.plan.algorithm}, {self.ranks} ranks of {self.cluster.name}, {self.total * 1e3:.4g} ms "
            f"modelled, {self.exposed.mean() * 1e3:.4g} ms exposed, imbalance {self.imbalance:.3f})"
        )


# Launch overhead of messages: the seconds in which a rank posts them, :attr:`mindspeed_cp.cluster.Cluster.posting` for
# each.


def launch_overheads(table: np.ndarray, ranks: int, steps: int, seconds: float) -> np.ndarray:
    """Return the seconds that each rank spends on the launch of messages in each step, fp64 [ranks, steps].

    A message is posted by both of its ends.

    Args:
        table: records of dtype :data:`mindspeed_cp.plan.transfers.TRANSFER`.
        ranks, steps: numbers of ranks and of timeline steps.
        seconds: of the launch of one message.
    """
    out = np.zeros((ranks, steps))
    if seconds == 0 or not len(table):
        return out
    for end in ("src", "dst"):
        step_of_rank = table[end] * steps + table["start"]
        out += np.bincount(step_of_rank, minlength=ranks * steps).reshape(ranks, steps)
    return out * seconds


# Waits of the ranks in a timeline: the message that arrives last, and its two ends.


#: After the kernels of step `step`, rank `rank` waits from `begin` to `end` (seconds) for messages that are due; the
#: message that arrives last has index `message` in the transfers of the direction.
WAIT_RECORD = np.dtype(
    [
        *((name, np.int64) for name in ("rank", "step", "message")),
        *((name, np.float64) for name in ("begin", "end")),
    ]
)

#: Content of a message by its kind (:data:`mindspeed_cp.plan.transfers.KINDS`), in full and for tables.
MESSAGE_KIND_NAMES = ("keys and values", "gradients of keys and values", "q, k, v and outputs", "hidden states")
MESSAGE_KIND_SHORT = ("keys", "gradients", "q, k, v, out", "hidden states")


def wait_records(timeline: Timeline, direction: str) -> np.ndarray:
    """Return the waits of all ranks in one direction: records of dtype WAIT_RECORD, by rank and step."""
    times, sent = timeline.steps(direction), timeline.transfers(direction)
    rank, step = np.nonzero(times[:, :, 2] > times[:, :, 1])
    out = np.zeros(len(rank), WAIT_RECORD)
    out["rank"], out["step"] = rank, step
    out["begin"], out["end"] = times[rank, step, 1], times[rank, step, 2]
    # The message of each rank and step that ends last; a rank also waits for the messages that it sends.
    count = times.shape[1]
    message = np.tile(np.arange(len(sent)), 2)
    step_of_rank = np.concatenate([sent["src"], sent["dst"]]) * count + sent["done"][message]
    order = np.lexsort((sent["end"][message], step_of_rank))
    message, step_of_rank = message[order], step_of_rank[order]
    out["message"] = message[np.searchsorted(step_of_rank, rank * count + step, "right") - 1]
    return out


def waiting_causes(timeline: Timeline) -> list[tuple[str, float]]:
    """Return why ranks do not compute: (cause, mean seconds of a rank), the largest first.

    The sum is the mean of `timeline.waiting`. A cause is a kind of message, inside nodes or between nodes, or the
    slowest rank.
    """
    seconds_by_cause: dict[str, float] = {}
    for direction in DIRECTIONS:
        waits = wait_records(timeline, direction)
        messages = timeline.transfers(direction)[waits["message"]]
        far = is_internode(messages, timeline.cluster)
        for kind, name in enumerate(MESSAGE_KIND_SHORT):
            for is_between, location in enumerate(("inside nodes", "between nodes")):
                selected = waits[(messages["kind"] == kind) & (far == is_between)]
                seconds = float((selected["end"] - selected["begin"]).sum()) / timeline.ranks
                if seconds > 0:
                    key = f"{name} {location}"
                    seconds_by_cause[key] = seconds_by_cause.get(key, 0.0) + seconds
    late = float((timeline.waiting - timeline.exposed).mean())
    if late > 1e-12 + 1e-9 * timeline.total:
        seconds_by_cause["the slowest rank at the end"] = late
    return sorted(seconds_by_cause.items(), key=lambda entry: -entry[1])


def fetch_waits(timeline: Timeline) -> float:
    """Return the mean seconds in which a rank waits for keys and values, or their gradients, between steps."""
    return sum(seconds for cause, seconds in waiting_causes(timeline) if cause.startswith(("keys", "gradients")))


def is_internode(sent: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Return which transfers go between nodes, int64, 0 or 1."""
    return (sent["src"] // cluster.ranks_per_node != sent["dst"] // cluster.ranks_per_node).astype(np.int64)
