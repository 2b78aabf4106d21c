"""Micro-batches of a replica with pipeline stages: how many, and in which order, by the time of the 1F1B schedule.

Stages run one micro-batch after the other, and each waits for the one before it in the forward and for the one behind
it in the backward (1F1B, PipeDream-Flush, 2006.09503). With p stages and m equal micro-batches a step takes
(m + p - 1) / m times the work of a stage: more and shorter micro-batches shrink the bubble. Unequal ones wait for the
longest; the first and the last are best short, since other stages wait for their forward and backward alone::

    stage 0   F0 F1 B0 F2 B1 F3 B2 .. B3
    stage 1      F0 B0 F1 B1 F2 B2 F3 B3      2 stages, 4 micro-batches; B takes twice as long as F

All times are integers, so that every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from mindspeed_cp.data.dispatch_candidates import fill_by_cost
from mindspeed_cp.data.dispatch_problem import DispatchProblem, Row

BACKWARD = 2  # times the forward
#: At most this many times as many micro-batches as were packed: shorter ones leave each rank of a replica too few
#: tokens to be even, which the cost of documents does not know.
MOST_SPLIT = 2
SWAPPED = 8  # micro-batches up to which exchanges of two are tried

Number = TypeVar("Number", int, float)


def pipeline_time(times: Sequence[Number], stages: int) -> Number:
    """Return when the 1F1B schedule of equal stages ends, times `stages * (1 + BACKWARD)`.

    Args:
        times: of each micro-batch over all stages, forward and backward, in the order of the schedule; integers give an
            integer.
        stages: number of pipeline stages.
    """
    count, zero = len(times), type(times[0])(0) if len(times) else 0
    if stages == 1:
        return (1 + BACKWARD) * sum(times, zero)
    orders = [list(_schedule(stage, stages, count)) for stage in range(stages)]
    done: list[list[list[Number | None]]] = [[[None] * count for _ in range(stages)] for _ in range(2)]
    clocks, following = [zero] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while following[stage] < len(order):
                backward, number = order[following[stage]]
                before = stage + (1 if backward else -1)
                ready = done[backward][before][number] if 0 <= before < stages else clocks[stage]
                if ready is None:
                    break
                clocks[stage] = max(clocks[stage], ready) + times[number] * (BACKWARD if backward else 1)
                done[backward][stage][number] = clocks[stage]
                following[stage] += 1
                moved = True
    return max(clocks)


def _schedule(stage: int, stages: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the order of a stage: (0 for forward or 1 for backward, micro-batch)."""
    ahead = min(stages - 1 - stage, count)
    for number in range(ahead):
        yield 0, number
    for number in range(count):
        if number + ahead < count:
            yield 0, number + ahead
        yield 1, number


def pipelined(problem: DispatchProblem, rows: Sequence[Row], stages: int) -> list[Row]:
    """Return the micro-batches of a replica as the pipeline takes them soonest, in their order.

    Args:
        problem: costs, bound of tokens, cost of a micro-batch; with equal counts the number of micro-batches stays.
        rows: the documents of each, as few as there can be.
        stages: number of pipeline stages.
    """
    documents = [document for row in rows for document in row]
    best = _ordered(problem, rows, stages)
    most = len(rows) if problem.equal_counts else min(MOST_SPLIT * len(rows), len(documents))
    for count in range(len(rows), most + 1):
        packed = fill_by_cost(problem, documents, count)
        if packed is None or not all(packed):
            continue
        best = min(best, _ordered(problem, packed, stages))
    time, order = best
    return _with_exchanges(problem, time, order, stages)


def _ordered(problem: DispatchProblem, rows: Sequence[Row], stages: int) -> tuple[int, list[Row]]:
    """Return time and order, the best of: longest first, shortest first, short at both ends."""
    descending = sorted((sorted(row) for row in rows), key=lambda row: (-problem.time_of(row), row))
    ascending = descending[::-1]
    orders = (descending, ascending, ascending[::2] + ascending[1::2][::-1], ascending[1::2] + ascending[::2][::-1])
    return min((_time(problem, order, stages), order) for order in orders)


def _with_exchanges(problem: DispatchProblem, time: int, order: list[Row], stages: int) -> list[Row]:
    """Exchange two micro-batches as long as that helps."""
    improved = len(order) <= SWAPPED
    while improved:
        improved = False
        for first in range(len(order)):
            for second in range(first + 1, len(order)):
                other = list(order)
                other[first], other[second] = order[second], order[first]
                other_time = _time(problem, other, stages)
                if other_time < time:
                    time, order, improved = other_time, other, True
    return order


def _time(problem: DispatchProblem, rows: Sequence[Row], stages: int) -> int:
    return pipeline_time([problem.time_of(row) + problem.micro_batch_cost for row in rows], stages)
