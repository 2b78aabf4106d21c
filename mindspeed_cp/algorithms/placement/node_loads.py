"""Placement of documents on whole nodes: all ranks of a node get equal parts of them."""

from __future__ import annotations

import heapq

from mindspeed_cp.algorithms.placement.policy import DocumentRanks
from mindspeed_cp.algorithms.placement.rank_loads import UNBOUNDED, DocumentCosts, RankLoads
from mindspeed_cp.algorithms.placement.water_fill import FILL_LIMIT, fill_fewest


class NodeLoads:
    """Work and tokens of every node while documents are placed on groups of neighbouring nodes.

    Sums are kept while documents are added, and the emptiest group is the head of a heap: a document that fits on it,
    as nearly all do, takes logarithmic time.

    Args:
        loads: loads of the ranks before.
        ranks_per_node: ranks of a node.
        fair: equal share of a rank, up to which ranks are filled.
        min_cross_node_length: shorter documents stay on one group of nodes if an empty group has room for them, and
            their tokens have room there.

    Attributes:
        seconds, tokens: sums of each node.
    """

    def __init__(self, loads: RankLoads, ranks_per_node: int, fair: float, min_cross_node_length: float = 0.0) -> None:
        self._costs: DocumentCosts = loads.costs
        self._min_cross_node_length = min_cross_node_length
        self._cap, self._per_node, self._fair = loads.cap, ranks_per_node, fair
        firsts = range(0, len(loads.seconds), ranks_per_node)
        self.seconds = [sum(loads.seconds[first : first + ranks_per_node]) for first in firsts]
        self.tokens = [float(sum(loads.tokens[first : first + ranks_per_node])) for first in firsts]
        self._before = list(self.seconds), list(self.tokens)
        most = [max(loads.tokens[first : first + ranks_per_node]) for first in firsts]
        self._surplus = [most[node] - tokens / ranks_per_node for node, tokens in enumerate(self.tokens)]
        self._heap: list[tuple[float, int]] = []  # (seconds, group) of groups of _width nodes
        self._width = 0

    def place(self, doc: int, width: int, work: float) -> DocumentRanks:
        """Place a document on the fewest groups of `width` nodes with room, in shares that level them; `work` is its
        work with redistributions over NICs."""
        if width != self._width:
            self._width, self._heap = width, [(load, group) for group, load in enumerate(self._group_loads(width))]
            heapq.heapify(self._heap)
        load, group = self._heap[0]
        full = FILL_LIMIT * self._fair * self._per_node * width
        is_short = work <= full and self._costs.lengths[doc] < self._min_cross_node_length
        fits = full - load >= work or is_short
        if fits and self._limit(group, doc, width) >= 1:
            self._add(doc, [group], [1.0], width, work)
            heapq.heapreplace(self._heap, (load + work, group))
            return doc, [group], [1.0]
        groups = range(len(self.seconds) // width)
        limits = [UNBOUNDED] * len(groups)
        if self._cap < UNBOUNDED:
            limits = [self._limit(group, doc, width) for group in groups]
        fair = self._fair * self._per_node * width
        chosen, shares = fill_fewest(groups, self._group_loads(width), work, 0.0, fair, limits)
        self._add(doc, chosen, shares, width, work)
        self._width = 0
        return doc, chosen, shares

    def add(self, doc: int, groups: list[int], shares: list[float], width: int) -> None:
        """Add a document to groups of `width` nodes."""
        self._add(doc, groups, shares, width, self._costs.work[doc])

    def _add(self, doc: int, groups: list[int], shares: list[float], width: int, work: float) -> None:
        length = self._costs.lengths[doc]
        for group, share in zip(groups, shares, strict=True):
            for node in range(group * width, (group + 1) * width):
                self.seconds[node] += share * work / width
                self.tokens[node] += share * length / width

    def add_to(self, loads: RankLoads) -> None:
        """Add to the loads of the ranks what was placed here."""
        per_node = self._per_node
        for node, (seconds, tokens) in enumerate(zip(*self._before, strict=True)):
            seconds, tokens = (self.seconds[node] - seconds) / per_node, (self.tokens[node] - tokens) / per_node
            for rank in range(node * per_node, (node + 1) * per_node):
                loads.seconds[rank] += seconds
                loads.tokens[rank] += tokens

    def _group_loads(self, width: int) -> list[float]:
        if width == 1:
            return list(self.seconds)
        return [sum(self.seconds[first : first + width]) for first in range(0, len(self.seconds), width)]

    def _limit(self, group: int, doc: int, width: int) -> float:
        """Return the largest share of a document that a group may take."""
        if self._cap == UNBOUNDED:
            return UNBOUNDED
        nodes = range(group * width, (group + 1) * width)
        most = max(self.tokens[node] / self._per_node + self._surplus[node] for node in nodes)
        return self._per_node * width * max(self._cap - most, 0.0) / max(self._costs.lengths[doc], 1)
