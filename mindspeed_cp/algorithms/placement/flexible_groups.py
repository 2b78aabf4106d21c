"""Long documents whole in groups of 1, 2, 4, ... neighbouring ranks that split heads, such that all groups are done at
about the same time.

FlexSP (2412.01523) chooses such groups by a mixed integer program. Here the least time is found by bisection: until a
time T, a document goes to the fullest group that has room for it, or opens a group of the least size that is done by
T. Documents come longest first, so sizes of new groups fall, and every group begins at a multiple of its size.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence

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
