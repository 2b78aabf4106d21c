"""Other ways to assign the documents of a global batch, to compare `balance.assign` with; same arguments,
same result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.published.systems.head_groups import differencing
from mindspeed_cp.data import balance
from mindspeed_cp.data.balance import (
    Assignment,
    CostFunction,
    best_fit_decreasing,
    make_dispatch_problem,
    to_assignment,
)


def in_order(
    lengths: Sequence[int] | np.ndarray,
    cost: CostFunction,
    replicas: int,
    *,
    token_bound: int,
    per_micro_batch: float = 0.0,
    rows: Sequence[int] | np.ndarray | None = None,
) -> Assignment:
    """Assign the documents as they come: rows in turn to the replicas."""
    problem = make_dispatch_problem(lengths, cost, replicas, token_bound, per_micro_batch, rows)
    return to_assignment(problem, balance.in_order(problem))


def first_fit(
    lengths: Sequence[int] | np.ndarray,
    cost: CostFunction,
    replicas: int,
    *,
    token_bound: int,
    per_micro_batch: float = 0.0,
    decreasing: bool = True,
) -> Assignment:
    """Pack by tokens: first fit (decreasing, by length) into micro-batches, which go to the replicas in turn."""
    problem = make_dispatch_problem(lengths, cost, replicas, token_bound, per_micro_batch)
    documents = range(len(problem.lengths))
    by_length = sorted(documents, key=lambda document: (-problem.lengths[document], document))
    rows: list[list[int]] = []
    rooms: list[int] = []
    for document in by_length if decreasing else documents:
        length = problem.lengths[document]
        row = next((number for number, room in enumerate(rooms) if room >= length), len(rows))
        if row == len(rows):
            rows.append([])
            rooms.append(problem.token_bound)
        rows[row].append(document)
        rooms[row] -= length
    groups = [rows[replica::replicas] for replica in range(replicas)]
    return to_assignment(problem, groups)


def karmarkar_karp(
    lengths: Sequence[int] | np.ndarray,
    cost: CostFunction,
    replicas: int,
    *,
    token_bound: int,
    per_micro_batch: float = 0.0,
) -> Assignment:
    """Assign by the largest differencing method over replicas, by cost; micro-batches by best fit."""
    problem = make_dispatch_problem(lengths, cost, replicas, token_bound, per_micro_batch)
    part = differencing(np.array(problem.costs), replicas)
    groups = [best_fit_decreasing(problem, np.flatnonzero(part == replica).tolist()) for replica in range(replicas)]
    return to_assignment(problem, groups)
