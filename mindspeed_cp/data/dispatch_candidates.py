"""The candidates of `balance.assign`: ways to assign documents to replicas and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from mindspeed_cp.data.dispatch_problem import DispatchProblem, DocumentGroups, Row, best_fit_decreasing
from mindspeed_cp.data.local_search import improve_by_documents, improve_by_rows
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import assign_to_least_loaded


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
        for groups in (ordered, improve_by_rows(problem, assign_rows(problem, rows))):
            if len(set(map(len, groups))) <= 1:
                yield groups
            else:
                yield from with_equal_counts(problem, groups)
        count = len(rows)
    yield from with_equal_counts(problem, longest_first(problem))
    for packed in (fill_by_cost(problem, documents, count), best_fit_decreasing(problem, documents)):
        if packed is not None:
            yield from with_equal_counts(problem, improve_by_rows(problem, assign_rows(problem, packed)))


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
            while 0 < len(rows) < count and len(longest := min(rows, key=partial(_split_order, problem))) > 1:
                rows.remove(longest)
                rows += [problem.by_cost(longest)[::2], problem.by_cost(longest)[1::2]]
        if len(rows) < count or not all(rows):
            return
        equal_groups.append(rows)
    yield equal_groups


def _split_order(problem: DispatchProblem, row: Row) -> tuple[bool, int, Row]:
    """Sort key that puts the row to split first: of those with several documents, the longest in time."""
    return len(row) < 2, -problem.time_of(row), row


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
