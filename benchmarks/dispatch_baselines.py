"""Other ways to deal the documents of a global batch, to compare `balance.assign` with; same arguments, same result."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from mindspeed_cp.data import deals
from mindspeed_cp.data.balance import Assignment, Cost, finish, make_problem
from mindspeed_cp.data.problem import pack


def in_order(
    lengths: Sequence[int] | np.ndarray,
    cost: Cost,
    replicas: int,
    *,
    token_bound: int,
    per_micro_batch: float = 0.0,
    rows: Sequence[int] | np.ndarray | None = None,
) -> Assignment:
    """The documents as they come: rows in turn to the replicas."""
    problem = make_problem(lengths, cost, replicas, None, token_bound, per_micro_batch, rows)
    return finish(problem, deals.in_order(problem), "in_order")


def first_fit(
    lengths: Sequence[int] | np.ndarray,
    cost: Cost,
    replicas: int,
    *,
    token_bound: int,
    per_micro_batch: float = 0.0,
    decreasing: bool = True,
) -> Assignment:
    """First fit (decreasing, by length) into micro-batches, which go to the replicas in turn: packing by tokens."""
    problem = make_problem(lengths, cost, replicas, None, token_bound, per_micro_batch)
    documents = range(len(problem.lengths))
    ordered = sorted(documents, key=lambda one: (-problem.lengths[one], one)) if decreasing else documents
    rows: list[list[int]] = []
    rooms: list[int] = []
    for document in ordered:
        length = problem.lengths[document]
        at = next((number for number, room in enumerate(rooms) if room >= length), len(rows))
        if at == len(rows):
            rows.append([])
            rooms.append(problem.bound)
        rows[at].append(document)
        rooms[at] -= length
    deal = [rows[replica::replicas] for replica in range(replicas)]
    return finish(problem, deal, "first_fit_decreasing" if decreasing else "first_fit")


def karmarkar_karp(
    lengths: Sequence[int] | np.ndarray,
    cost: Cost,
    replicas: int,
    *,
    token_bound: int,
    per_micro_batch: float = 0.0,
) -> Assignment:
    """The largest differencing method over replicas, by cost (Karmarkar and Karp 1982); micro-batches by best fit.

    Each document begins as a partition of its own: its cost in one part, nothing in the others. The two partitions
    whose parts differ most are merged, the largest part of one with the smallest of the other, until one is left.
    """
    problem = make_problem(lengths, cost, replicas, None, token_bound, per_micro_batch)
    # (-spread, number, parts by cost descending: (cost, documents))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-value, number, [(value, [number]), *((0, []) for _ in range(replicas - 1))])
        for number, value in enumerate(problem.costs)
    ]
    heapify(heap)
    while len(heap) > 1:
        (_, first, one), (_, _, other) = heappop(heap), heappop(heap)
        merged = [(a + b, mine + theirs) for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heappush(heap, (merged[-1][0] - merged[0][0], first, merged))
    parts = [documents for _, documents in heap[0][2]] if heap else [[] for _ in range(replicas)]
    deal = [pack(problem, part) for part in parts]
    return finish(problem, deal, "karmarkar_karp")
