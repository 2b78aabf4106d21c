"""Assignment of the documents of a global batch to replicas and micro-batches, so that all replicas end together.

A step lasts as long as its slowest replica, and a replica as long as its documents take: time proportional to the
tokens for linear layers, quadratic in the length for attention, and a constant for each micro-batch (launches, and the
loop itself)::

    documents   0: 8 tokens   1: 4   2: 3   3: 1   4: 4   5: 4      micro-batches of at most 8 tokens, 2 replicas
    in order    replica 0  [0]  [4 5]        64 + 32 = 96
                replica 1  [1 2 3]           26
    by time     replica 0  [0]               64
                replica 1  [1 4] [5 2 3]     32 + 26 = 58

Replicas may thus get different numbers of tokens and of micro-batches. If the loss is a sum over tokens divided by
their number over all replicas, the result of the step is the same, as the documents of the global batch are the same.

All decisions use integers: costs are rounded to multiples of 2**-40 of the largest one. Every rank, on any machine,
therefore derives the same assignment from the same costs. The candidates use longest processing time first (Graham
1969), best fit decreasing for micro-batches, and exchanges of documents between the slowest replica and others. The
documents in their given order are a candidate too, so the result is never worse than that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, assign_to_least_loaded
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.problem import document_pairs

LARGEST_COST = 2**40  #: the integer to which the largest cost is scaled
CostFunction = Callable[[np.ndarray], np.ndarray] | Sequence[float] | np.ndarray


@dataclass(frozen=True, eq=False)
class Assignment:
    """The replica and micro-batch of each document of a global batch.

    Attributes:
        micro_batches: micro-batches of each replica, none for a replica without documents; each the ascending
            documents, int64.
        seconds: modelled time of each replica, float64 [replicas], in the unit of the given cost.
    """

    micro_batches: Sequence[Sequence[np.ndarray]]
    seconds: np.ndarray

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of micro-batches of each replica."""
        return tuple(map(len, self.micro_batches))


def assign(
    lengths: Sequence[int] | np.ndarray,
    cost: CostFunction,
    replicas: int,
    *,
    token_bound: int,
    per_micro_batch: float = 0.0,
    rows: Sequence[int] | np.ndarray | None = None,
    equal_counts: bool = False,
) -> Assignment:
    """Assign the documents of one global batch to replicas and their micro-batches.

    The time of the slowest replica is minimized; of equal times, the assignment with fewer micro-batches is taken, then
    the one whose longest micro-batch is shortest. The micro-batches of a replica are sorted by descending time, so that
    one that does not fit into memory fails first.

    Args:
        lengths: tokens of each document, int [documents].
        cost: modelled time of each document, float [documents], or a function from lengths to it.
        replicas: number of data-parallel replicas.
        token_bound: maximum number of tokens in a micro-batch: the context, or what fits into memory.
        per_micro_batch: modelled time that a micro-batch takes in addition to its documents.
        rows: micro-batch of each document in the given order, int [documents], numbered from 0 over all replicas; row i
            is on replica i % replicas. None: micro-batches are filled in the order of the documents.
        equal_counts: all replicas have the same number of micro-batches, for replicas that wait for each other in each
            of them. Always possible if `rows` has the same number of micro-batches on each replica, none empty.

    Raises:
        ConfigError: a document is longer than the bound, there are too few documents for equal counts, or an argument
            is out of range.
    """
    problem = make_dispatch_problem(lengths, cost, replicas, token_bound, per_micro_batch, rows, equal_counts)
    return to_assignment(problem, best_candidate(problem))


def make_dispatch_problem(
    lengths: Sequence[int] | np.ndarray,
    cost: CostFunction,
    replicas: int,
    token_bound: int,
    per_micro_batch: float = 0.0,
    rows: Sequence[int] | np.ndarray | None = None,
    equal_counts: bool = False,
) -> DispatchProblem:
    """Check the arguments of :func:`assign` and convert them to integers."""
    tokens = _numbers("lengths", lengths, np.int64)
    seconds = _numbers("cost", cost(tokens) if callable(cost) else cost, np.float64)
    row_numbers = None if rows is None else tuple(_numbers("rows", rows, np.int64).tolist())
    for name, count in (("cost", len(seconds)), ("rows", len(tokens if row_numbers is None else row_numbers))):
        if count != len(tokens):
            raise ConfigError(f"{name} has {count} numbers for {len(tokens)} documents; give one for each")
    for name, values in (("lengths", tokens), ("cost", seconds), ("per_micro_batch", np.array([per_micro_batch]))):
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(bad):
            raise ConfigError(f"{name}: {values[bad[0]]} at {bad[0]}; valid: finite numbers, 0 or more")
    longer = np.flatnonzero(tokens > token_bound)
    if len(longer):
        raise ConfigError(
            f"document {longer[0]} has {tokens[longer[0]]} tokens, and a micro-batch at most {token_bound}; cut it, or "
            "raise the bound (data.seq_length)"
        )
    unit = max(float(seconds.max(initial=0.0)), float(per_micro_batch)) / LARGEST_COST
    costs = np.rint(seconds / unit).astype(np.int64) if unit else np.zeros(len(tokens), np.int64)
    return DispatchProblem(
        lengths=tuple(tokens.tolist()),
        costs=tuple(costs.tolist()),
        micro_batch_cost=round(per_micro_batch / unit) if unit else 0,
        replicas=int(replicas),
        equal_counts=equal_counts,
        token_bound=int(token_bound),
        rows=row_numbers,
        unit=unit,
    )


def to_assignment(problem: DispatchProblem, groups: DocumentGroups) -> Assignment:
    """Return the groups as arrays; the micro-batches of each replica by descending time."""
    micro_batches = [
        [np.array(row, np.int64) for row in sorted(map(sorted, group), key=lambda row: (-problem.time_of(row), row))]
        for group in groups
    ]
    return Assignment(micro_batches, np.array([problem.replica_time(group) for group in groups]) * problem.unit)


def _numbers(name: str, values: Sequence[float] | np.ndarray, kind: type) -> np.ndarray:
    array = np.asarray(values)
    is_whole = array.size == 0 or np.issubdtype(array.dtype, np.integer)
    if array.ndim != 1 or not (is_whole or (kind is np.float64 and np.issubdtype(array.dtype, np.floating))):
        what = "numbers" if kind is np.float64 else "whole numbers"
        raise ConfigError(f"{name} must be a flat list of {what}, not {array.dtype} of shape {list(array.shape)}")
    return array.astype(kind)


# The cost of documents: modelled seconds of a training step on one rank of a replica.
#
# Every rank of the replica has an equal share of the document. The time of linear layers is proportional to tokens,
# that of attention to the visible (query, key) pairs, with a higher rate for short tiles
# (`mindspeed_cp.cluster.ComputeCost`); the backward takes 2 and 2.5 times as long. A micro-batch adds the launches of
# its kernels. Communication is left out: most of it is hidden, and the rest grows with the documents, as compute does.
# Only elementwise sums, products and quotients are used, so every machine gets the same bits.

#: Kernels of a layer besides attention, forward and backward: norms, projections, rotary positions, MLP, residuals.
LINEAR_KERNELS = 36


@dataclass(frozen=True)
class DocumentCost:
    """Modelled seconds of documents and micro-batches on one rank.

    Attributes:
        cluster: the devices.
        layers: attention and linear part of each layer, on one tensor-parallel rank.
        ranks: number of context-parallel ranks, which share every document.
        whole_documents: True if attention tiles are as long as documents, because heads are split or short documents
            are on one rank; False if they are as long as a rank's share of a document.
        recomputed: forwards of attention and of the linear part that the backward computes again, 0 or 1 each.
    """

    cluster: Cluster
    layers: Sequence[tuple[AttentionConfig, LayerCost]]
    ranks: int = 1
    whole_documents: bool = False
    recomputed: tuple[int, int] = (0, 0)

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Return the seconds of each document, float64 [documents], from lengths, int64 [documents]."""
        documents, tokens = Documents(lengths), lengths / self.ranks
        short = lengths if self.whole_documents else -(-lengths // self.ranks)
        attention_forwards, linear_forwards = (1 + again for again in self.recomputed)
        total = np.zeros(len(lengths))
        for attention, layer in dict.fromkeys(self.layers):  # equal layers are computed once
            cost = ComputeCost(self.cluster, attention, layer)
            pairs = document_pairs(documents, documents, attention) / self.ranks
            seconds = cost.attention_seconds(pairs, short) * attention_forwards
            seconds = seconds + cost.attention_seconds(pairs, short, backward=True)
            seconds = seconds + cost.linear_layer_seconds(tokens) * linear_forwards
            seconds = seconds + cost.linear_layer_seconds(tokens, backward=True)
            total = total + seconds * self.layers.count((attention, layer))
        return total

    @property
    def per_micro_batch(self) -> float:
        """Seconds of kernel launches in a micro-batch: linear kernels of all layers, and an attention call for each
        rank's block, forward and backward."""
        return len(self.layers) * (LINEAR_KERNELS + 2 * self.ranks) * self.cluster.launch


# The assignment problem of a global batch in whole numbers. A document is its index in the batch.


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
