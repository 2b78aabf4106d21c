"""What is dealt, in whole numbers, and packing into micro-batches.  Documents are their numbers in the global batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

NEAR = 8192  # a slowest replica this part of its time above the least possible is as good as that
Row = list[int]  # documents of a micro-batch
Deal = list[list[Row]]  # for each replica its micro-batches


@dataclass(frozen=True)
class Problem:
    """What has to be dealt: see `balance.assign`.  Times are whole numbers of `unit`."""

    lengths: tuple[int, ...]
    costs: tuple[int, ...]
    fixed: int  # of each micro-batch
    replicas: int
    micro_batches: int | None
    equal_counts: bool
    bound: int
    rows: tuple[int, ...] | None
    unit: float

    def tokens_of(self, row: Iterable[int]) -> int:
        """Of one micro-batch."""
        return sum(self.lengths[document] for document in row)

    def time_of(self, row: Iterable[int]) -> int:
        """Of one micro-batch, without what is fixed."""
        return sum(self.costs[document] for document in row)

    def replica_time(self, group: Sequence[Row]) -> int:
        """Of all micro-batches of a replica."""
        return sum(map(self.time_of, group)) + self.fixed * len(group)

    def key(self, deal: Deal) -> tuple[int, int, int, int]:
        """What is to be small: replicas or micro-batches left without documents, then the time of the slowest
        replica, the number of micro-batches, and the time of the longest one."""
        wanted = self.micro_batches or 1
        empty = sum(max(0, wanted - sum(1 for row in group if row)) for group in deal)
        times = [self.time_of(row) for group in deal for row in group]
        return empty, max(map(self.replica_time, deal)), len(times), max(times, default=0)

    @cached_property
    def enough(self) -> int:
        """A time of the slowest replica after which nobody searches on: the least that there can be, and 1/8192."""
        fewest = -(-sum(self.lengths) // self.bound)
        mean = -(-(sum(self.costs) + self.fixed * fewest) // self.replicas)
        least = max(mean, max(self.costs, default=0) + self.fixed)
        return least + least // NEAR

    def by_cost(self, documents: Iterable[int]) -> Row:
        """Descending; of equal cost the longer one, then the earlier one."""
        return sorted(documents, key=lambda one: (-self.costs[one], -self.lengths[one], one))


def pack(problem: Problem, documents: Iterable[int]) -> list[Row]:
    """Best fit decreasing: few micro-batches; the longest document first, each to where the least room is left."""
    rows: list[Row] = []
    rooms: list[tuple[int, int]] = []  # (room, row), ascending
    for document in sorted(documents, key=lambda one: (-problem.lengths[one], one)):
        length = problem.lengths[document]
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            rows.append([])
            room, row = problem.bound, len(rows) - 1
        else:
            room, row = rooms.pop(at)
        rows[row].append(document)
        insort(rooms, (room - length, row))
    return rows
