"""The modelled timeline of one layer: what :func:`mindspeed_cp.cost.simulate` finds, and figures read off it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.cost.compute import LayerCost
from mindspeed_cp.cost.memory import layer_bytes
from mindspeed_cp.cost.transfers import KINDS, edges, turn_count
from mindspeed_cp.plan.program import Plan

#: A transfer of a timeline: `bytes` of kind KINDS[kind] from src to dst, of part `part`, posted in turn `start` and due
#: in turn `done`; on its way from `begin` until `end` (seconds).
SPENT = np.dtype(
    [
        *((name, np.int64) for name in ("src", "dst", "start", "done", "kind", "part")),
        *((name, np.float64) for name in ("bytes", "begin", "end")),
    ]
)


@dataclass(frozen=True, eq=False)
class Timeline:
    """One layer, forward and backward, on every rank. All times are modelled, in seconds since the first rank began.

    Attributes:
        total: until the last rank is done.
        compute: attention kernels of each rank, both directions, fp64 [ranks].
        linear: linear layers of each rank, projections among them, both directions, fp64 [ranks].
        waiting: what is left of the total: the rank waits for messages, or for the others at the end, fp64 [ranks].
        forward, backward: (start, computed, end) of every rank's turns, fp64 [ranks, turns + 2, 3]; the first entry
            is the wait for moves before the first turn, the last one that for those after the last. Where hidden
            states move, fp64 [ranks, turns + 6, 3]: two more at each end, the outer ones waits for these, the others
            projections (`edges`). Between the two directions a rank computes its other linear layers.
        transfers, transfers_backward: records of dtype SPENT, in the order in which they are posted.
        plan: that was simulated.
        cluster: on which, of `plan.topology.ranks_per_node` ranks a node.
        layer: its linear part.
        looked_at: ranks whose tiles were counted one by one; fewer than there are only in plans of millions of tiles,
            where some ranks stand for their neighbours.
    """

    total: float
    compute: np.ndarray
    linear: np.ndarray
    waiting: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    transfers: np.ndarray
    transfers_backward: np.ndarray
    plan: Plan
    cluster: Cluster
    layer: LayerCost
    looked_at: int

    @property
    def ranks(self) -> int:
        """Context-parallel ranks."""
        return len(self.compute)

    @cached_property
    def memory(self) -> np.ndarray:
        """Bytes that the attention holds at its fullest moment, int64 [ranks] (:func:`.memory.layer_bytes`)."""
        return layer_bytes(self.plan, self.layer.bytes_per_element)

    @property
    def edges(self) -> int:
        """Entries of `forward` and `backward` before those of the plan's turns, and after them."""
        return edges(self.plan)

    def is_attention(self, direction: str) -> np.ndarray:
        """Which entries of a direction's turns are the plan's, bool [turns]; kernels of others are projections."""
        turns = np.arange(turn_count(self.plan, direction))
        return (turns >= self.edges) & (turns < len(turns) - self.edges)

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest rank over the mean, less one."""
        busy = self.compute + self.linear
        return float(busy.max() / busy.mean()) - 1 if busy.mean() > 0 else 0.0

    @property
    def exposed(self) -> np.ndarray:
        """Seconds in which each rank waits for messages that are due, fp64 [ranks]."""
        there, back = ((turns[:, :, 2] - turns[:, :, 1]).sum(1) for turns in (self.forward, self.backward))
        return there + back

    @property
    def hidden(self) -> np.ndarray:
        """Seconds in which each rank computes, in attention or linear layers, while messages reach it, fp64 [ranks]."""
        out = np.zeros(self.ranks)
        for sent, turns in ((self.transfers, self.forward), (self.transfers_backward, self.backward)):
            order = np.argsort(sent["dst"], kind="stable")
            edges = np.searchsorted(sent["dst"][order], np.arange(self.ranks + 1))
            for rank in range(self.ranks):
                mine = sent[order[edges[rank] : edges[rank + 1]]]
                travelling = _union(mine["begin"], mine["end"])
                out[rank] += _overlap(travelling, turns[rank, :, 0], turns[rank, :, 1])
        return out

    @property
    def bytes_sent(self) -> np.ndarray:
        """Bytes that each rank sends, both directions, fp64 [ranks]."""
        both = np.concatenate([self.transfers, self.transfers_backward])
        return np.bincount(both["src"], both["bytes"], self.ranks)

    def by_kind(self) -> dict[str, float]:
        """Bytes that all ranks send, by kind of transfer."""
        both = np.concatenate([self.transfers, self.transfers_backward])
        return {name: float(both["bytes"][both["kind"] == kind].sum()) for kind, name in enumerate(KINDS)}


def _union(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Intervals as their union: disjoint ones, ascending, fp64 [n, 2]."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order]) if len(end) else end
    first = np.flatnonzero(np.append(True, begin[1:] > end[:-1])[: len(begin)])
    last = np.append(first[1:], len(begin)) - 1
    return np.stack([begin[first], end[last]], 1) if len(begin) else np.zeros((0, 2))


def _overlap(union: np.ndarray, start: np.ndarray, stop: np.ndarray) -> float:
    """Seconds that intervals have in common with a union of others."""
    if not len(union):
        return 0.0
    lengths = np.append(0.0, np.cumsum(union[:, 1] - union[:, 0]))

    def until(time: np.ndarray) -> np.ndarray:
        """Length of the union before a time."""
        i = np.searchsorted(union[:, 0], time, "right") - 1
        inside = np.clip(time - union[i, 0], 0, union[i, 1] - union[i, 0])
        return np.where(i >= 0, lengths[i] + inside, 0.0)

    return float((until(stop) - until(start)).sum())
