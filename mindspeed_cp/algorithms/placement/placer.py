"""Placement of the documents of a batch by one policy.

Loads are seconds of work. Documents whose heads are split go to whole nodes; other long ones to the fewest ranks that
have room for them, in one node if one has room; short ones whole to the rank with the least work. Then the shares of
the cut documents are changed to level the loads: a rank may have any share of a document
(:func:`mindspeed_cp.layout.weighted`), so cut documents fill up what whole documents leave uneven.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence

import numpy as np

from mindspeed_cp.algorithms.placement.estimate import PlacementModel
from mindspeed_cp.algorithms.placement.loads import (
    FILL_LIMIT,
    MIN_SHARE,
    UNBOUNDED,
    DocumentCosts,
    NodeLoads,
    NodeRoom,
    RankLoads,
    fill_fewest,
    water_fill_without_crumbs,
)
from mindspeed_cp.algorithms.placement.policy import DocumentRanks, DocumentShares, Placement, PlacementPolicy
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import assign_to_least_loaded

# Long documents whole in groups of 1, 2, 4, ... neighbouring ranks that split heads, such that all groups are done at
# about the same time.
#
# FlexSP (2412.01523) chooses such groups by a mixed integer program. Here the least time is found by bisection: until a
# time T, a document goes to the fullest group that has room for it, or opens a group of the least size that is done by
# T. Documents come longest first, so sizes of new groups fall, and every group begins at a multiple of its size.

#: Halvings of the interval of T, and the largest T in equal shares of all work.
HALVINGS, LATEST = 10, 2.0


def flexible_groups(
    seconds: Mapping[int, Sequence[float]], docs: Sequence[int], ranks: int, fair: float
) -> tuple[list[int], list[int]] | None:
    """Choose a group for each document.

    Args:
        seconds: of each document on a group, by its ranks.
        docs: documents, longest first.
        ranks: number of ranks.
        fair: equal share of all work, of these documents and others.

    Returns:
        Ranks of each document's group, and the first of them; None if there are no such groups until LATEST * fair.
    """
    sizes = sorted(seconds)
    low, high = fair, LATEST * fair
    best = _packed(seconds, docs, ranks, sizes, low)
    if best is not None:
        return best
    best = _packed(seconds, docs, ranks, sizes, high)
    for _ in range(HALVINGS if best is not None else 0):
        middle = (low + high) / 2
        packed = _packed(seconds, docs, ranks, sizes, middle)
        if packed is None:
            low = middle
        else:
            best, high = packed, middle
    return best


def _packed(
    seconds: Mapping[int, Sequence[float]], docs: Sequence[int], ranks: int, sizes: list[int], until: float
) -> tuple[list[int], list[int]] | None:
    """Return the groups that are done until a time, as `flexible_groups`."""
    loads: dict[int, list[tuple[float, int]]] = {size: [] for size in sizes}  # (load, first rank), ascending
    used, smallest = 0, max(sizes)
    group_size, group_first = [], []
    for doc in docs:
        best: tuple[float, int, int] | None = None  # load with the document, size, index among the groups of this size
        for size in sizes:
            added = seconds[size][doc]
            index = bisect_right(loads[size], (until - added, ranks)) - 1
            if index >= 0 and (best is None or loads[size][index][0] + added > best[0]):
                best = loads[size][index][0] + added, size, index
        if best is not None:
            load, size, index = best
            _, first = loads[size].pop(index)
        else:
            fitting = [size for size in sizes if seconds[size][doc] <= until and used + size <= ranks]
            if not fitting or fitting[0] > smallest:
                return None
            size = smallest = fitting[0]
            load, first = seconds[size][doc], used
            used += size
        insort(loads[size], (load, first))
        group_size.append(size)
        group_first.append(first)
    return group_size, group_first


# Equal groups, as verl has them (`verl/utils/seqlen_balancing.py`): documents whole in groups of one size.

#: Documents times groups up to which all documents are divided by differencing; of more the longest, and the others go
#: to the groups with least work.
DIFFERENCED = 2**14


def karmarkar_karp(costs: Sequence[float], groups: int) -> list[int]:
    """Divide documents into groups of about equal cost by the largest differencing method (Karmarkar and Karp 1982):
    the two divisions that are the most uneven become one, the fullest groups of one with the emptiest of the other.

    Args:
        costs: cost of each document, descending.
        groups: number of groups.

    Returns:
        The group of each document.
    """
    count = min(len(costs), max(DIFFERENCED // groups, 2 * groups))
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (groups - 1)
    heap = [(-cost, doc, [(cost, [doc]), *empty]) for doc, cost in enumerate(costs[:count])]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, doc, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        both = [(a + b, docs + more) for (a, docs), (b, more) in zip(first, reversed(second), strict=True)]
        both.sort(key=lambda group: -group[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], doc, both))
    group_of, loads = [0] * count, [0.0] * groups
    for group, (load, docs) in enumerate(heap[0][2] if heap else []):
        loads[group] = load
        for doc in docs:
            group_of[doc] = group
    return group_of + list(assign_to_least_loaded(list(costs[count:]), loads))


# Repair of a placement: the busiest ranks hand documents on.

#: Ranks with more than this multiple of an equal share hand on documents, as long as that makes the busier of the two
#: ranks less busy by at least REPAIR_MIN_GAIN.
REPAIR_ABOVE, REPAIR_MIN_GAIN = 1.01, 0.004


def repair_placement(
    loads: RankLoads, shared: list[DocumentRanks], whole: list[DocumentRanks], fair: float, ranks_per_node: int
) -> tuple[list[DocumentRanks], list[DocumentRanks]]:
    """Let the busiest rank repeatedly hand on one of its whole documents, or share it with the idlest rank of its node,
    while that helps. If the whole node is busy, the idlest rank of another node gets a whole document.

    Args:
        loads: loads of the ranks; updated.
        shared: documents that may be on several ranks.
        whole: documents on one rank.
        fair: equal share of all work.
        ranks_per_node: ranks of a node.

    Returns:
        `shared` and `whole` after the repair.
    """
    documents: dict[int, list[int]] = {}  # whole documents of each rank
    for doc, (rank,), _ in whole + [entry for entry in shared if len(entry[1]) == 1]:
        documents.setdefault(rank, []).append(doc)
    moved: set[int] = set()
    owners: dict[int, int] = {}  # new ranks of whole documents that were handed on
    seconds = loads.seconds
    busiest, idlest = _Heap(seconds, -1), _Heap(seconds, 1)
    for _ in range(2 * len(seconds)):
        rank = busiest.head
        if seconds[rank] <= REPAIR_ABOVE * fair:
            break
        first = rank // ranks_per_node * ranks_per_node
        taker = min(range(first, first + ranks_per_node), key=seconds.__getitem__)
        if seconds[taker] > fair:
            taker = idlest.head
        same_node = rank // ranks_per_node == taker // ranks_per_node
        handover = _best_handover(loads, rank, taker, documents.get(rank, []), same_node)
        if handover is None:
            break
        doc, share = handover
        documents[rank].remove(doc)
        moved.add(doc)
        loads.add(doc, [rank], [1.0], -1)
        if share == 1:
            loads.add(doc, [taker], [1.0])
            documents.setdefault(taker, []).append(doc)
            owners[doc] = taker
        else:
            owners.pop(doc, None)
            ranks = sorted((rank, taker))
            shares = [1 - share, share] if rank < taker else [share, 1 - share]
            loads.add(doc, ranks, shares)
            shared = [*shared, (doc, ranks, shares)]
        for heap in (busiest, idlest):
            heap.update((rank, taker))
    if not moved:
        return shared, whole
    shared = [entry for entry in shared if len(entry[1]) > 1 or entry[0] not in moved]
    kept = [entry for entry in whole if entry[0] not in moved]
    return shared, [*kept, *((doc, [rank], [1.0]) for doc, rank in owners.items())]


class _Heap:
    """The rank with the least or (sign -1) the most load, the first of several."""

    def __init__(self, seconds: list[float], sign: int) -> None:
        self._seconds, self._sign = seconds, sign
        self._heap = [(sign * load, rank) for rank, load in enumerate(seconds)]
        heapq.heapify(self._heap)

    def update(self, ranks: tuple[int, ...]) -> None:
        """Take in new loads of ranks."""
        for rank in ranks:
            heapq.heappush(self._heap, (self._sign * self._seconds[rank], rank))

    @property
    def head(self) -> int:
        """The rank; outdated entries are dropped."""
        while True:
            load, rank = self._heap[0]
            if load == self._sign * self._seconds[rank]:
                return rank
            heapq.heappop(self._heap)


def _best_handover(
    loads: RankLoads, rank: int, taker: int, documents: list[int], may_share: bool
) -> tuple[int, float] | None:
    """Return the document of a rank, and the share of it for the taker, that minimize the higher load of the two ranks;
    None if no document lowers it by REPAIR_MIN_GAIN."""
    costs, seconds = loads.costs, loads.seconds
    best, handover = seconds[rank] * (1 - REPAIR_MIN_GAIN), None
    for doc in documents:
        work = costs.work[doc]
        giver_load, taker_load = seconds[rank] - work, seconds[taker]  # without the document
        if loads.tokens[taker] + costs.lengths[doc] > loads.cap:
            continue
        if taker_load + work < best:
            best, handover = max(taker_load + work, giver_load), (doc, 1.0)
        divided, overhead = costs.divided[doc], costs.overhead[doc]
        if divided <= 0 or not may_share:
            continue
        share = min(max((giver_load - taker_load + divided) / (2 * divided), MIN_SHARE / 2), 1 - MIN_SHARE / 2)
        higher = max(giver_load + (1 - share) * divided, taker_load + share * divided) + overhead
        if higher < best:
            best, handover = higher, (doc, share)
    return handover


#: How often the shares of cut documents are levelled.
LEVELLING_SWEEPS = 2


class DocumentPlacer:
    """Places the documents of one batch.

    Args:
        model: cost model of the batch.
        with_linear: linear layers run where attention does, and count as work.
        token_cap: maximum number of tokens on a rank; None: no limit.
        min_cross_node_length: shorter documents are not cut over several nodes while one node has room for their
            tokens.

    Attributes:
        widest: nodes over which heads can be split.
        equal_sizes: ranks of equal groups that can split heads.

    Raises:
        ConfigError: a document, or the batch, has more tokens than all ranks may hold.
    """

    def __init__(
        self,
        model: PlacementModel,
        with_linear: bool = True,
        token_cap: int | None = None,
        min_cross_node_length: float = 0.0,
    ) -> None:
        topology, heads = model.topology, model.attention.heads
        self.nodes, self.per_node, self.ranks = topology.nodes, topology.ranks_per_node, topology.ranks
        #: Nodes in turn: equal documents, of which some ranks get more, then leave all nodes equally many tokens.
        self._ranks_in_turn = np.arange(self.ranks).reshape(self.nodes, self.per_node).T.ravel().tolist()
        self.min_cross_node_length = min_cross_node_length
        self.cap = UNBOUNDED if token_cap is None else float(token_cap)
        longest, tokens = int(model.lengths.max(initial=0)), int(model.lengths.sum())
        if tokens > self.ranks * self.cap:
            what, most = f"document {int(np.argmax(model.lengths))}", longest
            if longest <= self.ranks * self.cap:
                what, most = "the batch", tokens
            raise ConfigError(
                f"{what} has {most} tokens, more than {self.ranks} ranks of max_seqlen_per_dp_cp_rank = {token_cap} "
                f"hold; valid: max_seqlen_per_dp_cp_rank of {-(-tokens // self.ranks)} or more, or more ranks"
            )
        work = model.work if with_linear else model.attention_work
        divided, overhead = model.divided(with_linear)
        self.widest = 1  # nodes over which heads can be split: every rank needs one
        self._work_over = {1: work.tolist()}  # by number of nodes, with redistributions over NICs
        sizes = [2**i for i in range(self.ranks.bit_length()) if self.per_node % 2**i == 0 and 2**i <= heads]
        while self.nodes % (2 * self.widest) == 0 and 2 * self.widest * self.per_node <= heads:
            self.widest *= 2
            sizes.append(self.widest * self.per_node)
            self._work_over[self.widest] = (work + model.redistribution_work(sizes[-1])).tolist()
        self.equal_sizes = sizes[1:]
        self._flexible_seconds = {size: ((work + model.redistribution_work(size)) / size).tolist() for size in sizes}
        order = np.argsort(-work, kind="stable")
        self._sorted_work = work[order]
        self.fair = float(work.sum()) / self.ranks
        self._docs = order.tolist()
        self._costs = DocumentCosts(work.tolist(), divided.tolist(), overhead.tolist(), model.lengths.tolist())

    def counts(self, policy: PlacementPolicy) -> tuple[int, int]:
        """Return how many documents may be cut, and how many have their heads split; policies with equal counts place
        alike."""
        if not self.fair:
            return 0, 0
        cut = int(np.searchsorted(-self._sorted_work, -policy.cut * self.fair, "left"))
        return cut, int(np.searchsorted(-self._sorted_work, -policy.split * self.fair * self.per_node, "left"))

    def place(
        self, policy: PlacementPolicy, before: Placement | None = None, delay: np.ndarray | None = None
    ) -> Placement:
        """Return the placement of a policy.

        Args:
            policy: its parameters.
            before: a placement of the same policy; documents that it has on several nodes stay where they are.
            delay: seconds that ranks wait under `before`, fp64 [ranks]: all other documents are placed as if this were
                work, so that ranks finish at the same time.
        """
        if policy.everywhere:
            return self._place_everywhere(policy)
        loads = RankLoads(self._costs, self.ranks, self.cap)
        shared: list[DocumentRanks] = []
        by_size: dict[int, list[DocumentRanks]] = {}
        if before is not None:
            shared, by_size = before.on_several_nodes(self.per_node)
            for entry in shared:
                loads.add(*entry)
        kept = {entry[0] for entries in (shared, *by_size.values()) for entry in entries}
        fair = self.fair
        if delay is not None:
            loads.seconds = (np.array(loads.seconds) + delay).tolist()
            fair += float(delay.mean())
        cut, halved = self.counts(policy)
        self._place_split(loads, policy, by_size, kept, fair)
        docs = [doc for doc in self._docs[halved:] if doc not in kept] if kept else self._docs[halved:]
        cut = max(cut - halved - len([doc for doc in self._docs[halved:cut] if doc in kept]), 0)
        if policy.power:
            shared += [self._place_on_power_of_two(loads, doc) for doc in docs[:cut]]
        else:
            room = NodeRoom(loads, self.per_node, FILL_LIMIT * fair)
            shared += [self._place_on_fewest(loads, room, doc) for doc in docs[:cut]]
        whole = self._place_whole(loads, docs[cut:], shared, fair)
        if not policy.power:
            for _ in range(LEVELLING_SWEEPS):
                shared = [self._levelled(loads, *entry) for entry in shared]
            shared, whole = repair_placement(loads, shared, whole, fair, self.per_node)
            shared = [self._levelled(loads, *entry) for entry in shared]
        return Placement.from_lists(policy, shared + whole, by_size)

    def _place_split(
        self,
        loads: RankLoads,
        policy: PlacementPolicy,
        by_size: dict[int, list[DocumentRanks]],
        kept: set[int],
        fair: float,
    ) -> None:
        """Place the documents whose heads are split, besides those that are kept in `by_size`."""
        nodes = NodeLoads(loads, self.per_node, fair, self.min_cross_node_length)
        for size, entries in by_size.items():
            for entry in entries:
                nodes.add(*entry, size // self.per_node, self._costs.work[entry[0]])
        full = FILL_LIMIT * self.fair * self.per_node
        for doc in self._docs[: self.counts(policy)[1]]:
            if doc not in kept:
                width = 1  # nodes over which its heads are split: as many as it needs
                while policy.wide and width < self.widest and self._work_over[width][doc] > full * width:
                    width *= 2
                split_document = nodes.place(doc, width, self._work_over[width][doc])
                by_size.setdefault(width * self.per_node, []).append(split_document)
        nodes.add_to(loads)

    def _place_everywhere(self, policy: PlacementPolicy) -> Placement:
        """Place every document on all ranks, or on all groups of nodes by heads."""
        width = policy.group_nodes or (self.widest if policy.wide else 1)
        count = self.nodes // width if policy.split == 0 else self.ranks
        doc = np.arange(len(self._docs))
        share = np.full(len(doc) * count, 1.0 / count)
        members = DocumentShares(np.repeat(doc, count), np.tile(np.arange(count), len(doc)), share)
        if policy.split == 0:
            return Placement(policy, DocumentShares.from_lists([]), {width * self.per_node: members})
        return Placement(policy, members, {})

    def place_equal(self, policy: PlacementPolicy) -> Placement | None:
        """Place documents whole in equal groups, but those with more work than a group's equal share: each of these in
        the emptiest of the least groups that have room for it, or in equal shares on as many of the widest as it
        needs; None if it needs several that are less than a node."""
        seconds, full = self._flexible_seconds, FILL_LIMIT * self.fair
        sizes = [size for size in seconds if size >= policy.equal]
        loads, rest = np.zeros(self.ranks), []
        by_size: dict[int, list[DocumentRanks]] = {}
        for doc in self._docs:
            size = next((size for size in sizes if seconds[size][doc] <= full), sizes[-1])
            if size == policy.equal and seconds[size][doc] <= full:
                rest.append(doc)
                continue
            count = max(1, min(round(seconds[size][doc] / self.fair), self.ranks // size))
            if count > 1 and size < self.per_node:
                return None
            groups = loads.reshape(-1, size)
            chosen = np.sort(np.argsort(groups.max(1), kind="stable")[:count])
            groups[chosen] += seconds[size][doc] / count
            by_size.setdefault(size, []).append((doc, chosen.tolist(), [1 / count] * count))
        of_group = loads.reshape(-1, policy.equal).max(1).tolist()
        costs = [seconds[policy.equal][doc] for doc in rest]
        owners = assign_to_least_loaded(costs, of_group) if by_size else karmarkar_karp(costs, len(of_group))
        entries = by_size.setdefault(policy.equal, [])
        entries += [(doc, [group], [1.0]) for doc, group in zip(rest, owners, strict=True)]
        return Placement.from_lists(policy, [], {size: each for size, each in by_size.items() if each})

    def place_flexible(self, policy: PlacementPolicy) -> Placement | None:
        """Return the placement of a policy of flexible groups, maybe above the token cap; None if there is none.

        If the policy is not `wide`, heads are split inside nodes alone: the keys of a document over several whole nodes
        are fetched between them.
        """
        cut, _ = self.counts(policy)
        docs = self._docs[:cut]
        least = policy.group_nodes * self.per_node
        seconds = {size: each for size, each in self._flexible_seconds.items() if size >= least}
        groups = flexible_groups(seconds, docs, self.ranks, self.fair) if seconds else None
        if groups is None:
            return None
        loads = RankLoads(self._costs, self.ranks, self.cap)
        by_size: dict[int, list[DocumentRanks]] = {}
        shared: list[DocumentRanks] = []
        for doc, size, first in zip(docs, *groups, strict=True):
            groups_of_doc = 1 if policy.wide or size % self.per_node or first % self.per_node else size // self.per_node
            split_over = size // groups_of_doc
            members = list(range(first // split_over, first // split_over + groups_of_doc))
            by_size.setdefault(split_over, []).append((doc, members, [1 / groups_of_doc] * groups_of_doc))
            for rank in range(first, first + size):
                loads.seconds[rank] += self._flexible_seconds[size][doc]
                loads.tokens[rank] += self._costs.lengths[doc] / size
        whole = by_size.pop(1, []) + self._place_whole(loads, self._docs[cut:], shared, self.fair) + shared
        return Placement.from_lists(policy, whole, by_size)

    def _place_on_fewest(self, loads: RankLoads, room: NodeRoom, doc: int) -> DocumentRanks:
        """Place a document on the fewest ranks with room, on the node with the most room if that is enough."""
        costs, per_node = self._costs, self.per_node
        emptiest = room.emptiest_rank
        if loads.seconds[emptiest] + costs.work[doc] <= room.full and loads.share_limits([emptiest], doc)[0] >= 1:
            loads.add(doc, [emptiest], [1.0])
            room.update([emptiest])
            return doc, [emptiest], [1.0]
        node = int(room.free.argmax())
        ranks: Sequence[int] = range(node * per_node, (node + 1) * per_node)
        is_long = costs.lengths[doc] >= self.min_cross_node_length
        if loads.room(ranks) < costs.lengths[doc] or (room.free[node] < costs.divided[doc] and is_long):
            order = np.argsort(-room.free, kind="stable").tolist()
            tokens_of = [loads.room(range(node * per_node, (node + 1) * per_node)) for node in range(self.nodes)]
            order.sort(key=lambda node: tokens_of[node] < MIN_SHARE * costs.lengths[doc])  # next to none: last
            work, tokens, count = 0.0, 0.0, 0
            while count < self.nodes and (work < costs.divided[doc] or tokens < costs.lengths[doc]):
                work += float(room.free[order[count]])
                tokens += tokens_of[order[count]]
                count += 1
            ranks = [rank for node in sorted(order[:count]) for rank in range(node * per_node, (node + 1) * per_node)]
        limits = loads.share_limits(ranks, doc)
        rank_loads = [loads.seconds[rank] for rank in ranks]
        fair = room.full / FILL_LIMIT
        chosen, shares = fill_fewest(ranks, rank_loads, costs.divided[doc], costs.overhead[doc], fair, limits)
        loads.add(doc, chosen, shares)
        room.update(chosen)
        return doc, chosen, shares

    def _place_on_power_of_two(self, loads: RankLoads, doc: int) -> DocumentRanks:
        """Place a document on a power of two of neighbouring ranks, in equal shares."""
        work, length = self._costs.work[doc], self._costs.lengths[doc]
        least = max(work / self.fair if self.fair else 1.0, length / self.cap, 1.0)
        count = 1
        while count < least and count * 2 <= self.ranks:
            count *= 2
        first = min(range(0, self.ranks - count + 1, count), key=lambda i: max(loads.seconds[i : i + count]))
        ranks, shares = list(range(first, first + count)), [1.0 / count] * count
        loads.add(doc, ranks, shares)
        return doc, ranks, shares

    def _place_whole(
        self, loads: RankLoads, docs: list[int], shared: list[DocumentRanks], fair: float
    ) -> list[DocumentRanks]:
        """Place documents, longest first, each whole on the rank with the least work that has room, of equal ones on
        nodes in turn. A document that fits on no rank is cut, and added to `shared`."""
        work, lengths = self._costs.work, self._costs.lengths
        whole_share, rank_lists, placed = [1.0], [[rank] for rank in range(self.ranks)], []  # lists are not copied
        while docs:
            owners = assign_to_least_loaded(
                [work[doc] for doc in docs], loads.seconds,
                sizes=[lengths[doc] for doc in docs], filled=loads.tokens, bound=self.cap, order=self._ranks_in_turn,
            )  # fmt: skip
            placed += [(doc, rank_lists[rank], whole_share) for doc, rank in zip(docs, owners, strict=False)]
            docs = docs[len(owners) :]
            if docs:  # no rank has room for all of the next one
                room = NodeRoom(loads, self.per_node, FILL_LIMIT * fair)
                shared.append(self._place_on_fewest(loads, room, docs[0]))
                docs = docs[1:]
        return placed

    def _levelled(self, loads: RankLoads, doc: int, ranks: list[int], shares: list[float]) -> DocumentRanks:
        """Return the document on the same ranks, or fewer of them, in shares that level their loads."""
        if len(ranks) == 1:
            return doc, ranks, shares
        loads.add(doc, ranks, shares, -1)
        limits = loads.share_limits(ranks, doc)
        rank_loads = [loads.seconds[rank] for rank in ranks]
        ranks, shares = water_fill_without_crumbs(ranks, rank_loads, self._costs.divided[doc], limits)
        loads.add(doc, ranks, shares)
        return doc, ranks, shares
