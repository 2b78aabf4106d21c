"""Work and tokens of every rank while the documents of a batch are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNBOUNDED = float("inf")


@dataclass(frozen=True)
class DocumentCosts:
    """Costs of each document: `work` on one rank; `divided` * f + `overhead` on each rank that has the share f of it,
    because its chunks are shorter than the document and kernels slower.

    Attributes:
        work, divided, overhead: seconds of each document.
        lengths: tokens of each document.
    """

    work: list[float]
    divided: list[float]
    overhead: list[float]
    lengths: list[int]


class RankLoads:
    """Loads of all ranks.

    Attributes:
        seconds: work of each rank.
        tokens: tokens of each rank.
        cap: maximum number of tokens on a rank; UNBOUNDED: no limit.
    """

    def __init__(self, costs: DocumentCosts, ranks: int, cap: float) -> None:
        self.costs, self.cap = costs, cap
        self.seconds, self.tokens = [0.0] * ranks, [0.0] * ranks

    def add(self, doc: int, ranks: list[int], shares: list[float], sign: int = 1) -> None:
        """Add a document to its ranks; with sign -1, remove it."""
        costs, length = self.costs, sign * self.costs.lengths[doc]
        if len(ranks) == 1:
            self.seconds[ranks[0]] += sign * costs.work[doc]
            self.tokens[ranks[0]] += length
            return
        divided, overhead = sign * costs.divided[doc], sign * costs.overhead[doc]
        for rank, share in zip(ranks, shares, strict=True):
            self.seconds[rank] += share * divided + overhead
            self.tokens[rank] += share * length

    def room(self, ranks: Sequence[int]) -> float:
        """Return the number of tokens that ranks may still take."""
        if self.cap == UNBOUNDED:
            return UNBOUNDED
        return sum(max(self.cap - self.tokens[rank], 0.0) for rank in ranks)

    def share_limits(self, ranks: Sequence[int], doc: int) -> list[float]:
        """Return the largest share of a document that each rank may take."""
        if self.cap == UNBOUNDED:
            return [UNBOUNDED] * len(ranks)
        return [max(self.cap - self.tokens[rank], 0.0) / max(self.costs.lengths[doc], 1) for rank in ranks]


class NodeRoom:
    """Room and the least load of every node, kept while documents are added to ranks.

    Args:
        loads: loads of the ranks.
        ranks_per_node: ranks of a node.
        full: load up to which ranks are filled.

    Attributes:
        full: the same.
        free: seconds up to `full` of the node's ranks, fp64 [nodes].
        lowest: least load of the node's ranks, fp64 [nodes].
    """

    def __init__(self, loads: RankLoads, ranks_per_node: int, full: float) -> None:
        self._loads, self._per_node, self.full = loads, ranks_per_node, full
        self.free, self.lowest = np.zeros((2, len(loads.seconds) // ranks_per_node))
        self.update(range(0, len(loads.seconds), ranks_per_node))

    def update(self, ranks: Sequence[int]) -> None:
        """Read the loads of the nodes of some ranks anew."""
        for node in {rank // self._per_node for rank in ranks}:
            seconds = self._loads.seconds[node * self._per_node : (node + 1) * self._per_node]
            self.free[node] = sum([self.full - load for load in seconds if load < self.full])
            self.lowest[node] = min(seconds)

    @property
    def emptiest_rank(self) -> int:
        """The rank with the least load, the first of several."""
        first = int(self.lowest.argmin()) * self._per_node
        return min(range(first, first + self._per_node), key=self._loads.seconds.__getitem__)
