"""The assignment problem of a global batch in whole numbers.  A document is its index in the batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import assign_to_least_loaded

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


# The candidates of `balance.assign`: ways to assign documents to replicas and micro-batches.


def best_candidate(problem: DispatchProblem) -> DocumentGroups:
    """Return the best candidate.

    Raises:
        ConfigError: no candidate keeps both the bound of tokens and equal counts.
    """
    best = None
    for groups in _candidates(problem):
        best = groups if best is None else min(best, groups, key=problem.objective)
        idle, slowest, *_ = problem.objective(best)
        if problem.replicas > 1 and not idle and slowest <= problem.good_enough_time:
            break
    if best is None:
        raise ConfigError(
            f"equal_counts: {len(problem.lengths)} documents of {sum(problem.lengths)} tokens were not packed into "
            f"equally many micro-batches of {problem.token_bound} tokens on {problem.replicas} replicas; give more "
            "documents"
        )
    return best


def _candidates(problem: DispatchProblem) -> Iterator[DocumentGroups]:
    documents, ordered = range(len(problem.lengths)), in_order(problem)
    rows = [row for group in ordered for row in group]
    count = 0  # number of micro-batches in which documents are then arranged by cost
    if all(problem.tokens_of(row) <= problem.token_bound for row in rows):
        for groups in (ordered, assign_rows(problem, rows)):
            if len(set(map(len, groups))) <= 1:
                yield groups
            else:
                yield from with_equal_counts(problem, groups)
        count = len(rows)
    yield from with_equal_counts(problem, longest_first(problem))
    for packed in (fill_by_cost(problem, documents, count), best_fit_decreasing(problem, documents)):
        if packed is not None:
            yield from with_equal_counts(problem, assign_rows(problem, packed))


def in_order(problem: DispatchProblem) -> DocumentGroups:
    """Assign the given rows, row i to replica i % replicas; without rows, fill them in the order of the documents."""
    if problem.rows is not None:
        rows: list[Row] = [[] for _ in range(max(problem.rows, default=-1) + 1)]
        for document, row in enumerate(problem.rows):
            rows[row].append(document)
    else:
        rows, room = [], -1
        for document, length in enumerate(problem.lengths):
            if room < length:
                rows.append([])
                room = problem.token_bound
            rows[-1].append(document)
            room -= length
    return [rows[replica :: problem.replicas] for replica in range(problem.replicas)]


def fill_by_cost(problem: DispatchProblem, documents: Iterable[int], count: int) -> list[Row] | None:
    """Pack documents into `count` micro-batches of similar time: the costliest first, each into the fastest micro-batch
    that has room. Return None if a document finds no room."""
    order = problem.by_cost(documents)
    costs, lengths = ([of_all[document] for document in order] for of_all in (problem.costs, problem.lengths))
    owners = assign_to_least_loaded(costs, [0] * count, sizes=lengths, bound=problem.token_bound)
    if len(owners) < len(order):
        return None
    rows: list[Row] = [[] for _ in range(count)]
    for document, row in zip(order, owners, strict=True):
        rows[row].append(document)
    return rows


def shorten_longest(problem: DispatchProblem, rows: list[Row]) -> list[Row]:
    """Repack the documents into as many micro-batches, if the longest micro-batch then takes less time."""
    packed = fill_by_cost(problem, (document for row in rows for document in row), len(rows))
    if packed is None or not all(packed):
        return rows
    return min(rows, packed, key=lambda rows: max(map(problem.time_of, rows), default=0))


def longest_first(problem: DispatchProblem) -> DocumentGroups:
    """Assign documents to replicas by longest processing time first, pack each replica's documents, then exchange
    documents between replicas.

    The cost of a document includes its tokens' share of the cost of a micro-batch, because a replica with more tokens
    needs more micro-batches.
    """
    costs = [
        cost + problem.micro_batch_cost * length // problem.token_bound
        for cost, length in zip(problem.costs, problem.lengths, strict=True)
    ]
    assigned: list[Row] = [[] for _ in range(problem.replicas)]
    order = sorted(range(len(costs)), key=lambda document: (-costs[document], -problem.lengths[document], document))
    replicas = assign_to_least_loaded([costs[document] for document in order], [0] * problem.replicas)
    for document, replica in zip(order, replicas, strict=True):
        assigned[replica].append(document)
    groups = [best_fit_decreasing(problem, documents) for documents in assigned]
    improve_by_documents(problem, groups)
    return [shorten_longest(problem, group) for group in groups]


def with_equal_counts(problem: DispatchProblem, groups: DocumentGroups) -> Iterator[DocumentGroups]:
    """Yield the groups. If the problem asks for equal counts, first repack each replica's documents into as many
    micro-batches as the replica with most has; yield nothing if a replica has too few documents for that."""
    if not problem.equal_counts:
        yield groups
        return
    count = max(map(len, groups), default=0)
    equal_groups = []
    for group in groups:
        rows = fill_by_cost(problem, (document for row in group for document in row), count)
        if rows is None or not all(rows):
            rows = list(group)
            while 0 < len(rows) < count:  # split the longest in time of those with several documents
                longest = min(rows, key=lambda row: (len(row) < 2, -problem.time_of(row), row))
                if len(longest) < 2:
                    break
                rows.remove(longest)
                rows += [problem.by_cost(longest)[::2], problem.by_cost(longest)[1::2]]
        if len(rows) < count or not all(rows):
            return
        equal_groups.append(rows)
    yield equal_groups


def assign_rows(problem: DispatchProblem, rows: Sequence[Row]) -> DocumentGroups:
    """Assign whole micro-batches to replicas: the longest first, each to the replica with the least time among those
    with fewer than rows / replicas of them, rounded up."""
    limit = -(-len(rows) // problem.replicas)
    groups: DocumentGroups = [[] for _ in range(problem.replicas)]
    rows = sorted(rows, key=lambda row: (-problem.time_of(row), row))
    times = [problem.time_of(row) + problem.micro_batch_cost for row in rows]
    replicas = assign_to_least_loaded(times, [0] * problem.replicas, bound=limit)
    for row, replica in zip(rows, replicas, strict=True):
        groups[replica].append(list(row))
    return groups


# Exchanges between the slowest replica and others that improve an assignment.


#: Maximum number of exchanges; each one makes the slower of two replicas faster.
MAX_EXCHANGES = 200

#: Number of replicas, the fastest first, with which the slowest replica tries to exchange.
MAX_PARTNERS = 4


def improve_by_documents(problem: DispatchProblem, groups: DocumentGroups) -> None:
    """Move or swap documents between the slowest replica and others while that makes the slower of the two faster."""
    times = [problem.replica_time(group) for group in groups]
    for _ in range(MAX_EXCHANGES):
        order = sorted(range(len(times)), key=lambda replica: (times[replica], replica))
        slowest, partners = order[-1], order[: min(MAX_PARTNERS, len(order) - 1)]
        if times[slowest] <= problem.good_enough_time:
            break
        for partner in partners:
            documents, partner_documents = (
                [document for row in groups[replica] for document in row] for replica in (slowest, partner)
            )
            exchanged = _exchange(problem, documents, partner_documents, times[slowest] - times[partner])
            if exchanged is None:
                continue
            packed = [best_fit_decreasing(problem, documents) for documents in exchanged]
            new_times = [problem.replica_time(group) for group in packed]
            if max(new_times) < times[slowest]:
                groups[slowest], groups[partner] = packed
                times[slowest], times[partner] = new_times
                break
        else:
            break


def _exchange(problem: DispatchProblem, documents: Row, partner_documents: Row, gap: int) -> tuple[Row, Row] | None:
    """Return the documents of two replicas after the move or swap that comes nearest to closing the gap between their
    times; None if nothing narrows the gap, or if the first replica would have no document left."""
    if gap <= 0:
        return None
    costs = np.array([problem.costs[document] for document in documents])
    returned = np.array([0, *(problem.costs[document] for document in partner_documents)])  # entry 0: nothing, a move
    order = np.argsort(returned, kind="stable")
    below = np.searchsorted(returned[order], costs - gap // 2, "right")
    best: tuple[int, int, int] | None = None  # remaining gap, index of the given document, entry of `returned`
    for step in (-1, 0):
        entry = order[np.clip(below + step, 0, len(returned) - 1)]
        gain = costs - returned[entry]
        remaining = np.where((gain > 0) & (gain < gap), np.abs(2 * gain - gap), np.iinfo(np.int64).max)
        index = int(np.argmin(remaining))
        if 0 < gain[index] < gap and (best is None or int(remaining[index]) < best[0]):
            best = int(remaining[index]), index, int(entry[index])
    if best is None:
        return None
    _, given, taken = best
    rest, grown = documents[:given] + documents[given + 1 :], [*partner_documents, documents[given]]
    if taken:
        rest.append(partner_documents[taken - 1])
        del grown[taken - 1]
    return (rest, grown) if rest else None
