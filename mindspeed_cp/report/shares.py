"""Which ranks share each document: runs of positions, and the ranks that hold them, for queries and for keys."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mindspeed_cp.cost.transfers import heads_of
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan import Plan


@dataclass(frozen=True)
class Share:
    """One document in a plan.

    Attributes:
        doc: its number in the batch.
        queries: (ranks, rows) of each run of positions, from the first on: these ranks compute these queries; where
            they are several, each does some of the heads.
        keys: the same of who has keys and values when the computing begins; a kv head may be on several ranks.
    """

    doc: int
    queries: tuple[tuple[tuple[int, ...], int], ...]
    keys: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def ranks(self) -> list[int]:
        """All ranks that compute some of it."""
        return sorted({rank for ranks, _ in self.queries for rank in ranks})


def shares(plan: Plan, most: int) -> list[Share]:
    """The documents of a plan, the longest first, at most so many."""
    lengths = plan.documents.lengths
    chosen = [int(doc) for doc in np.argsort(-lengths, kind="stable")[:most] if lengths[doc] > 0]
    found: dict[int, Share] = {}
    for piece in plan.pieces:
        mine = [doc for doc in chosen if piece.documents.lengths[doc] > 0]
        queries = _runs(piece.q_layout, piece.attention.heads, mine)
        same = piece.kv_layout is piece.q_layout
        keys = queries if same else _runs(piece.kv_layout, piece.attention.kv_heads, mine)
        for doc in mine:
            found[doc] = Share(doc, queries[doc], keys.get(doc, ()))
    return [found[doc] for doc in chosen if doc in found]


#: How far documents are spread.
ONE_RANK, ONE_NODE, NODES = "whole on one rank", "shared in a node", "shared by nodes"


def spread(plan: Plan) -> dict[str, tuple[int, int]]:
    """(documents, tokens) that one rank computes alone, ranks of one node, and ranks of several nodes."""
    ranks, nodes = np.zeros((2, len(plan.documents)), np.int64)
    for piece in plan.pieces:
        layout, per = piece.q_layout, plan.topology.ranks_per_node
        busy = heads_of(layout, piece.attention.heads) > 0
        spans = layout.spans[busy[layout.spans["rank"]]]
        for count, where in ((ranks, spans["rank"]), (nodes, spans["rank"] // per)):
            count += np.bincount(np.unique(spans["doc"] * layout.ranks + where) // layout.ranks, minlength=len(count))
    lengths = plan.documents.lengths
    chosen = {ONE_RANK: ranks == 1, ONE_NODE: (ranks > 1) & (nodes == 1), NODES: nodes > 1}
    return {name: (int(some.sum()), int(lengths[some].sum())) for name, some in chosen.items()}


def _runs(layout: Layout, heads: int, documents: list[int]) -> dict[int, tuple[tuple[tuple[int, ...], int], ...]]:
    """(ranks, rows) of each run of some documents."""
    spans = layout.spans[np.isin(layout.spans["doc"], documents)]
    spans = spans[(heads_of(layout, heads) > 0)[spans["rank"]]]
    spans = spans[np.lexsort((spans["rank"], spans["start"], spans["doc"]))]
    edges = np.searchsorted(spans["doc"], [*documents, *(doc + 1 for doc in documents)])
    out = {}
    for at, doc in enumerate(documents):
        mine = spans[edges[at] : edges[at + len(documents)]]
        out[doc] = _covering(mine["start"].tolist(), mine["stop"].tolist(), mine["rank"].tolist())
    return out


def _covering(start: list[int], stop: list[int], rank: list[int]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Spans of ranks, by start, as runs that follow each other; neighbours of the same ranks are one run."""
    borders = sorted({*start, *stop})
    runs: list[tuple[tuple[int, ...], int]] = []
    here: list[tuple[int, int]] = []  # (stop, rank) of the spans that are open
    following = 0
    for low, high in pairwise(borders):
        here = [one for one in here if one[0] > low]
        while following < len(start) and start[following] <= low:
            here.append((stop[following], rank[following]))
            following += 1
        ranks = tuple(sorted({who for _, who in here}))
        if runs and runs[-1][0] == ranks:
            runs[-1] = (ranks, runs[-1][1] + high - low)
        else:
            runs.append((ranks, high - low))
    return tuple(runs)
