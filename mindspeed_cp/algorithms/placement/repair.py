"""Repair of a placement: the busiest ranks hand documents on."""

from __future__ import annotations

import heapq

from mindspeed_cp.algorithms.placement.policy import DocumentRanks
from mindspeed_cp.algorithms.placement.rank_loads import RankLoads
from mindspeed_cp.algorithms.placement.water_fill import MIN_SHARE

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
            for heap in (busiest, idlest):
                heap.update((rank, taker))
            continue
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
