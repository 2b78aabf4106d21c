"""assign_to_least_loaded: how documents find a rank, and micro-batches a replica."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import chain, repeat


def assign_to_least_loaded(
    costs: Sequence[float],
    loads: list[float],
    *,
    ties: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    filled: list[float] | None = None,
    bound: float = math.inf,
    order: Sequence[int] | None = None,
) -> list[int]:
    """Assign items in the given order, each to the bin with the least load. Given by descending cost, the busiest bin
    is at most 4/3 times as loaded as it must be (Graham 1969).

    Args:
        costs: what each item adds to the load of its bin.
        loads: load of each bin before; what the items add is added.
        ties: of bins with equal load the one whose items have the least sum of these is taken, then the first one.
        sizes: how much of the bound each item takes; 1 if not given.
        filled: how much of the bound each bin has taken before; what the items take is added.
        bound: most that a bin takes.
        order: all bins; of equal ones the first here is taken. Default: ascending.

    Returns:
        The bin of each item, up to the first item that no bin has room for.
    """
    filled = [0.0] * len(loads) if filled is None else filled
    order = range(len(loads)) if order is None else order
    heap = [(loads[number], 0, place, number) for place, number in enumerate(order)]
    heapq.heapify(heap)
    without_room: list[tuple[float, tuple[float, int, int, int]]] = []  # by negative room: the most room comes first
    bins: list[int] = []
    for cost, tie, size in zip(costs, ties or repeat(0), sizes or repeat(1), strict=False):
        while without_room and -without_room[0][0] >= size:
            heapq.heappush(heap, heapq.heappop(without_room)[1])
        while heap and bound - filled[heap[0][3]] < size:
            entry = heapq.heappop(heap)
            heapq.heappush(without_room, (filled[entry[3]] - bound, entry))
        if not heap:
            break
        load, sum_of_ties, place, number = heap[0]
        heapq.heapreplace(heap, (load + cost, sum_of_ties + tie, place, number))
        filled[number] += size
        bins.append(number)
    for load, _, _, number in chain(heap, (entry for _, entry in without_room)):
        loads[number] = load
    return bins
