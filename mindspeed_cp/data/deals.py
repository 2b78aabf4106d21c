"""The candidates of `balance.assign`: ways to deal documents to replicas and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from heapq import heapify, heapreplace

from mindspeed_cp.data.exchange import exchange_documents, exchange_rows
from mindspeed_cp.data.problem import Deal, Problem, Row, pack
from mindspeed_cp.errors import ConfigError


def best(problem: Problem) -> Deal:
    """The best of the candidates.  ConfigError if the documents do not fit into the micro-batches."""
    found = None
    for deal in _candidates(problem):
        found = deal if found is None else min(found, deal, key=problem.key)
        empty, slowest, *_ = problem.key(found)
        if problem.replicas > 1 and not empty and slowest <= problem.enough:
            break
    if found is None:
        total = sum(problem.lengths)
        room = problem.replicas * (problem.micro_batches or 0)
        raise ConfigError(
            f"micro_batches = {problem.micro_batches}: {len(problem.lengths)} documents of {total} tokens were not "
            f"packed into {room} micro-batches of {problem.bound} tokens; give more"
        )
    return found


def _candidates(problem: Problem) -> Iterator[Deal]:
    ordered = in_order(problem)
    everything, count = range(len(problem.lengths)), problem.replicas * (problem.micro_batches or 0)
    if fits(problem, ordered):
        yield ordered
        rows = [row for group in ordered for row in group]
        yield exchange_rows(problem, deal_rows(problem, rows))
        count = count or len(rows)
    if problem.micro_batches is None:
        yield from alike(problem, longest_first(problem))
    for found in (spread(problem, everything, count), pack(problem, everything)):
        if found is None or (problem.micro_batches is not None and len(found) > count):
            continue
        if problem.micro_batches is not None:
            found += [[] for _ in range(count - len(found))]
        yield from alike(problem, exchange_rows(problem, deal_rows(problem, found)))


def fits(problem: Problem, deal: Deal) -> bool:
    """Whether the deal keeps the bound of tokens and the number of micro-batches."""
    if any(problem.tokens_of(row) > problem.bound for group in deal for row in group):
        return False
    return problem.micro_batches is None or all(len(group) <= problem.micro_batches for group in deal)


def in_order(problem: Problem) -> Deal:
    """The rows as they came, row i on replica i % replicas; or filled one after the other."""
    if problem.rows is not None:
        rows: list[Row] = [[] for _ in range(max(problem.rows, default=-1) + 1)]
        for document, row in enumerate(problem.rows):
            rows[row].append(document)
    else:
        rows, room = [], -1
        for document, length in enumerate(problem.lengths):
            if room < length:
                rows.append([])
                room = problem.bound
            rows[-1].append(document)
            room -= length
    return [rows[replica :: problem.replicas] for replica in range(problem.replicas)]


def spread(problem: Problem, documents: Iterable[int], count: int) -> list[Row] | None:
    """`count` micro-batches of about equal time: the costliest document first, each to the one that takes least among
    those with room; None if a document found no room."""
    out: list[Row] = [[] for _ in range(count)]
    times, rooms = [0] * count, [problem.bound] * count
    for document in problem.by_cost(documents):
        length = problem.lengths[document]
        at = min((at for at, room in enumerate(rooms) if room >= length), key=times.__getitem__, default=None)
        if at is None:
            return None
        out[at].append(document)
        times[at] += problem.costs[document]
        rooms[at] -= length
    return out


def level(problem: Problem, rows: list[Row]) -> list[Row]:
    """The same documents in as many micro-batches, the longest of which takes less, if that can be found."""
    out = spread(problem, (document for row in rows for document in row), len(rows))
    if out is None or not all(out):
        return rows
    return min(rows, out, key=lambda found: max(map(problem.time_of, found), default=0))


def longest_first(problem: Problem) -> Deal:
    """Longest processing time first, then exchanges; replicas have as many micro-batches as their documents need.

    A token's share of what a micro-batch takes is counted with its document, whose replica will need the more of them.
    """
    share = [cost + problem.fixed * n // problem.bound for cost, n in zip(problem.costs, problem.lengths, strict=True)]
    loads = [(0, replica) for replica in range(problem.replicas)]
    heapify(loads)
    groups: list[Row] = [[] for _ in range(problem.replicas)]
    for document in sorted(range(len(share)), key=lambda one: (-share[one], -problem.lengths[one], one)):
        load, replica = loads[0]
        groups[replica].append(document)
        heapreplace(loads, (load + share[document], replica))
    deal = [pack(problem, group) for group in groups]
    exchange_documents(problem, deal)
    return [level(problem, group) for group in deal]


def alike(problem: Problem, deal: Deal) -> Iterator[Deal]:
    """The deal; where counts are to be equal, with its documents in as many micro-batches on every replica; nothing
    where one has too few documents for that."""
    if not problem.equal_counts:
        yield deal
        return
    count = max(map(len, deal), default=0)
    out = []
    for group in deal:
        rows = spread(problem, (document for row in group for document in row), count)
        if rows is None or not all(rows):
            rows = list(group)
            while 0 < len(rows) < count and len(longest := min(rows, key=partial(_splits_first, problem))) > 1:
                rows.remove(longest)
                rows += [problem.by_cost(longest)[::2], problem.by_cost(longest)[1::2]]
        if len(rows) < count or not all(rows):
            return
        out.append(rows)
    yield out


def _splits_first(problem: Problem, row: Row) -> tuple[bool, int, Row]:
    return len(row) < 2, -problem.time_of(row), row


def deal_rows(problem: Problem, rows: Sequence[Row]) -> Deal:
    """Whole micro-batches to replicas, the longest first, each to the replica that takes least; as many on each."""
    most = -(-len(rows) // problem.replicas)
    deal: Deal = [[] for _ in range(problem.replicas)]
    times = [0] * problem.replicas
    for row in sorted(rows, key=lambda row: (-problem.time_of(row), row)):
        replica = min((r for r in range(problem.replicas) if len(deal[r]) < most), key=lambda r: (times[r], r))
        deal[replica].append(list(row))
        times[replica] += problem.time_of(row) + problem.fixed
    return deal
