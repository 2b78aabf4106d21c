"""Messages of a timeline as bars: those that a rank gets, or sends, of one kind and posted in one turn, are one bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.cost import Cluster
from mindspeed_cp.cost.timeline import Timeline
from mindspeed_cp.plan import Plan
from mindspeed_cp.report.carried import carried, summed

#: `messages` messages to (or from) rank `rank`, of kind KINDS[kind] and part `part`, posted in turn `start` and due in
#: turn `done`, or some of them later; `far`: between nodes; `bytes` in all, on their way from `begin` to `end`
#: (seconds), the first to the last. `peer`: the other end of the message with most bytes.
BAR = np.dtype(
    [
        *((name, np.int64) for name in ("rank", "start", "done", "kind", "part", "far", "messages", "peer")),
        *((name, np.float64) for name in ("bytes", "begin", "end")),
    ]
)


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars of one direction of a timeline.

    Attributes:
        plan, direction: of which.
        sent: the transfers, records of dtype SPENT.
        end: "dst": bars of what ranks get; "src": of what they send.
        bars: records of dtype BAR, by rank and time.
        members, edges: sent[members[edges[i] : edges[i + 1]]] are the messages of bar i, those of most bytes first.
        detailed: the documents of bars of these ranks are known; None: of all.
    """

    plan: Plan
    direction: str
    sent: np.ndarray
    end: str
    bars: np.ndarray
    members: np.ndarray
    edges: np.ndarray
    detailed: Sequence[int] | None

    @staticmethod
    def of(timeline: Timeline, direction: str, end: str, detailed: Sequence[int] | None = None) -> Bars:
        """The bars of a timeline's "forward" or "backward"."""
        sent = timeline.transfers if direction == "forward" else timeline.transfers_backward
        far = is_far(sent, timeline.cluster)
        keys = (far, sent["part"], sent["kind"], sent["start"], sent[end])
        order = np.lexsort((-sent["bytes"], *keys))
        mine = sent[order]
        new = np.zeros(len(mine), bool)
        new[:1] = True
        for key in keys:
            new[1:] |= np.diff(key[order]) != 0
        first = np.flatnonzero(new)
        bars = np.zeros(len(first), BAR)
        for name, field in (("rank", end), ("start", "start"), ("kind", "kind"), ("part", "part")):
            bars[name] = mine[field][first]
        bars["peer"] = mine["src" if end == "dst" else "dst"][first]
        bars["far"] = far[order][first]
        edges = np.append(first, len(mine))
        bars["messages"] = np.diff(edges)
        for name, field, over in (
            ("done", "done", np.minimum),
            ("bytes", "bytes", np.add),
            ("begin", "begin", np.minimum),
            ("end", "end", np.maximum),
        ):
            bars[name] = over.reduceat(mine[field], first) if len(first) else 0
        return Bars(timeline.plan, direction, sent, end, bars, order, edges, detailed)

    def peers(self, bar: int) -> list[int]:
        """The other ends of a bar's messages, those of most bytes first."""
        members = self.members[self.edges[bar] : self.edges[bar + 1]]
        return [int(rank) for rank in self.sent["src" if self.end == "dst" else "dst"][members]]

    def documents(self, bar: int) -> list[int]:
        """Documents that a bar's messages carry, those of most rows first; empty where that is not known."""
        low, high = self._documents[0][bar : bar + 2]
        return [int(doc) for doc in self._documents[1][low:high]]

    @cached_property
    def _documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Documents of all bars in a row, and where those of each begin."""
        wanted = None if self.detailed is None else np.isin(self.sent[self.end], list(self.detailed))
        table = carried(self.plan, self.direction, self.sent, wanted)
        of = np.empty(len(self.sent), np.int64)
        of[self.members] = np.repeat(np.arange(len(self.bars)), np.diff(self.edges))
        table["message"] = of[table["message"]]
        table = summed(table)
        return np.searchsorted(table["message"], np.arange(len(self.bars) + 1)), table["doc"]


def is_far(sent: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Which transfers go between nodes, int64 0 or 1."""
    return (sent["src"] // cluster.ranks_per_node != sent["dst"] // cluster.ranks_per_node).astype(np.int64)
