"""Loads of ranks and of nodes while documents are placed, and the shares of a document that level them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from operator import gt

import numpy as np

from mindspeed_cp.algorithms.placement.policy import DocumentRanks

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


# Shares of one document that level the loads of its members (ranks, or groups of nodes).

#: A member is filled up to this multiple of an equal part of all work before a document is cut over more members.
FILL_LIMIT = 1.01

#: No member takes less than this multiple of an equal share: it would fetch nearly all keys for a few queries.
MIN_SHARE = 0.2

#: A document gets no further members once it is on so many times as many as would do with the tokens that they may
#: still take and no other work, even if these are then filled above FILL_LIMIT: once all are nearly full, what is left
#: of their room would cut it over hundreds of them.
MOST_MEMBERS = 2


def fill_fewest(
    members: Sequence[int], loads: list[float], work: float, overhead: float, fair: float, limits: list[float]
) -> tuple[list[int], list[float]]:
    """Choose the fewest members, from the emptiest on, that have room for a document; those that are allowed next to
    nothing of it come last.

    Args:
        members: ranks or groups of nodes.
        loads: load of each member.
        work, overhead: a member with the share f gets work * f + overhead.
        fair: load up to which a member is filled, before FILL_LIMIT.
        limits: largest share that each member may take.

    Returns:
        The chosen members, ascending, and the shares that level them.
    """
    held, allowed = 0.0, 0  # members that can hold the document, those with the largest limits first
    for limit in sorted(limits, reverse=True):
        held, allowed = held + limit, allowed + 1
        if held >= 1:
            break
    allowed = max(allowed, 1)
    least = MIN_SHARE / allowed
    most = MOST_MEMBERS * max(allowed, work / fair if fair else 1.0)
    order = sorted(range(len(loads)), key=lambda i: (limits[i] < least, loads[i]))
    room, shares, count = 0.0, 0.0, 0
    for i in order:
        count += 1
        room += max(FILL_LIMIT * fair - loads[i] - overhead, 0.0)
        shares += limits[i]
        if shares >= 1 and (room >= work or count >= most):
            break
    chosen = sorted(order[:count])
    return water_fill_without_crumbs(
        [members[i] for i in chosen], [loads[i] for i in chosen], work, [limits[i] for i in chosen]
    )


def water_fill_without_crumbs(
    members: list[int], loads: list[float], work: float, limits: list[float]
) -> tuple[list[int], list[float]]:
    """Return members and the shares that level their loads; members that would take next to nothing are left out."""
    while True:
        shares = water_fill(loads, work, limits)
        least = MIN_SHARE / len(members)
        keep = [i for i, share in enumerate(shares) if share >= least]
        if len(keep) == len(members) or not keep or sum(limits[i] for i in keep) < 1:
            positive = [i for i, share in enumerate(shares) if share > 0]
            if not positive:  # next to no work beside the loads
                return [members[loads.index(min(loads))]], [1.0]
            return [members[i] for i in positive], [shares[i] for i in positive]
        members, loads, limits = [members[i] for i in keep], [loads[i] for i in keep], [limits[i] for i in keep]


def water_fill(loads: list[float], work: float, limits: list[float]) -> list[float]:
    """Return the shares of the work, none above its limit, that minimize the highest load."""
    count = len(loads)
    if count == 1 or work <= 0:
        total_share = sum(min(limit, 1.0) for limit in limits)
        return [min(limit, 1.0) / total_share for limit in limits] if total_share >= 1 else [1.0 / count] * count
    total, level = work, 0.0
    for number, load in enumerate(sorted(loads), 1):
        total += load
        if total / number <= load and number > 1:
            break
        level = total / number  # the level if the `number` emptiest members are filled up to it
    shares = [max(level - load, 0.0) / work for load in loads]
    if any(map(gt, shares, limits)):
        return _water_fill_limited(loads, work, limits)
    return shares


def _water_fill_limited(loads: list[float], work: float, limits: list[float]) -> list[float]:
    """Do as `water_fill` where limits bind: between two levels at which a member begins or ends to take work, the work
    taken grows in a straight line."""
    most = [min(limit, 1.0) * work for limit in limits]
    total = sum(most)
    if total <= work:
        return [part / total for part in most] if total else [1.0 / len(loads)] * len(loads)
    changes = [(load, 1) for load in loads] + [(load + part, -1) for load, part in zip(loads, most, strict=True)]
    level, taking, taken = 0.0, 0, 0.0
    for next_level, change in sorted(changes):
        taken += taking * (next_level - level)
        if taken >= work:
            level = next_level - (taken - work) / taking
            break
        level, taking = next_level, taking + change
    parts = [min(max(level - load, 0.0), part) for load, part in zip(loads, most, strict=True)]
    total = sum(parts)
    return [part / total for part in parts]


# Placement of documents on whole nodes: all ranks of a node get equal parts of them.


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
            self.add(doc, [group], [1.0], width, work)
            heapq.heapreplace(self._heap, (load + work, group))
            return doc, [group], [1.0]
        groups = range(len(self.seconds) // width)
        limits = [UNBOUNDED] * len(groups)
        if self._cap < UNBOUNDED:
            limits = [self._limit(group, doc, width) for group in groups]
        fair = self._fair * self._per_node * width
        chosen, shares = fill_fewest(groups, self._group_loads(width), work, 0.0, fair, limits)
        self.add(doc, chosen, shares, width, work)
        self._width = 0
        return doc, chosen, shares

    def add(self, doc: int, groups: list[int], shares: list[float], width: int, work: float) -> None:
        """Add a document of so much work to groups of `width` nodes."""
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
