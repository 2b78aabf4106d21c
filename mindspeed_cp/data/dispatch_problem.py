"""The assignment problem of a global batch in whole numbers.  A document is its index in the batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

#: The search ends when the slowest replica is within this fraction (1/8192) of the least possible time.
TOLERANCE_DIVISOR = 8192

Row = list[int]  # documents of a micro-batch
DocumentGroups = list[list[Row]]  # micro-batches of each replica


@dataclass(frozen=True)
class DispatchProblem:
    """Arguments of `balance.assign` in whole numbers; times are multiples of `unit` seconds."""

    lengths: tuple[int, ...]
    costs: tuple[int, ...]
    micro_batch_cost: int  # of each micro-batch
    replicas: int
    equal_counts: bool
    token_bound: int
    rows: tuple[int, ...] | None
    unit: float

    def tokens_of(self, row: Iterable[int]) -> int:
        """Return the tokens of a micro-batch."""
        return sum(self.lengths[document] for document in row)

    def time_of(self, row: Iterable[int]) -> int:
        """Return the time of a micro-batch without `micro_batch_cost`."""
        return sum(self.costs[document] for document in row)

    def replica_time(self, group: Sequence[Row]) -> int:
        """Return the time of all micro-batches of a replica."""
        return sum(map(self.time_of, group)) + self.micro_batch_cost * len(group)

    def objective(self, groups: DocumentGroups) -> tuple[int, int, int, int]:
        """Return what is minimized, in lexicographic order: number of replicas without documents, time of the slowest
        replica, number of micro-batches, time of the longest micro-batch."""
        idle = sum(not any(group) for group in groups)
        times = [self.time_of(row) for group in groups for row in group]
        return idle, max(map(self.replica_time, groups)), len(times), max(times, default=0)

    @cached_property
    def good_enough_time(self) -> int:
        """Time of the slowest replica at which the search ends: the lower bound plus 1/8192 of it."""
        fewest = -(-sum(self.lengths) // self.token_bound)
        mean = -(-(sum(self.costs) + self.micro_batch_cost * fewest) // self.replicas)
        least = max(mean, max(self.costs, default=0) + self.micro_batch_cost)
        return least + least // TOLERANCE_DIVISOR

    def by_cost(self, documents: Iterable[int]) -> Row:
        """Sort by descending cost, then descending length, then index."""
        return sorted(documents, key=lambda document: (-self.costs[document], -self.lengths[document], document))


def best_fit_decreasing(problem: DispatchProblem, documents: Iterable[int]) -> list[Row]:
    """Pack documents into few micro-batches: the longest first, each into the one with the least sufficient room."""
    rows: list[Row] = []
    rooms: list[tuple[int, int]] = []  # (room, row), ascending
    for document in sorted(documents, key=lambda document: (-problem.lengths[document], document)):
        length = problem.lengths[document]
        position = bisect_left(rooms, (length, -1))
        if position == len(rooms):
            rows.append([])
            room, row = problem.token_bound, len(rows) - 1
        else:
            room, row = rooms.pop(position)
        rows[row].append(document)
        insort(rooms, (room - length, row))
    return rows
