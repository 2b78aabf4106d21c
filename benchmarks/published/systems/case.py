"""A batch on some ranks, and candidates that stand for all ranks by the tiles of some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.published.timing import Candidate
from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.cluster import Cluster
from mindspeed_cp.plan import Plan

#: Tiles of so many ranks stand for those of all, where documents are cut evenly over all of them.
LOOKED_AT = 16


@dataclass(frozen=True)
class Case:
    """One batch on some ranks.

    Attributes:
        documents: the batch, or one row of it.
        topology: the ranks; its cluster is the preset that plans may go by.
        attention: of the layer.
        cluster: that preset, of as many ranks a node as are in use.
        shared: candidates that were made already, for other clusters or heads too.
        placements: `simulated_placements` of this project's plans; None: the default.
    """

    documents: Documents
    topology: Topology
    attention: AttentionConfig
    cluster: Cluster
    shared: dict[object, Candidate] = field(default_factory=dict)
    placements: int | None = None

    def once(self, make: Callable[[Documents, Topology, AttentionConfig], Candidate], *what: object) -> Candidate:
        """Return a candidate that depends on documents, nodes and ranks, and on `what` names it, alone: neither on the
        cluster's speeds nor on numbers of heads."""
        topology = replace(self.topology, cluster=None)
        key = self.documents, topology, what
        if key not in self.shared:
            self.shared[key] = make(self.documents, topology, self.attention)
        return self.shared[key].with_attention(self.attention)


def even_shares(label: str, plan: Plan) -> Candidate:
    """Return a plan in which every document is cut evenly over all ranks, so that evenly spaced ranks stand for the
    others."""
    count = min(plan.ranks, LOOKED_AT)
    chosen = np.unique(np.linspace(0, plan.ranks - 1, count).round().astype(np.int64))
    return Candidate(label, plan, nearest(chosen, plan.ranks))


def by_heads(case: Case, label: str, plan: Plan, degree: int) -> Candidate:
    """Return a plan whose groups of ranks split heads: where all have as many, the first member of each group stands
    for the others, and of many groups evenly spaced ones for their neighbours. Tiles do not depend on key/value
    heads."""
    if plan.attention.heads % degree:
        return Candidate(label, plan)
    groups = plan.ranks // degree
    chosen = np.unique(np.linspace(0, groups - 1, min(groups, LOOKED_AT)).round().astype(np.int64))
    representative = np.repeat(nearest(chosen, groups), degree) * degree
    like = case.once(lambda *_: Candidate(label, plan, representative), label, plan.attention.heads)
    return Candidate(label, plan, representative, counted=like.counted)


def nearest(chosen: np.ndarray, count: int) -> np.ndarray:
    """Return which of the chosen numbers, ascending, is nearest to each number below `count`."""
    edges = (chosen[1:] + chosen[:-1] + 1) // 2
    out: np.ndarray = chosen[np.searchsorted(edges, np.arange(count), "right")]
    return out
