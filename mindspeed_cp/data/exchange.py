"""Exchanges between the slowest replica and others that bring a deal nearer to its best."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.data.problem import Deal, Problem, Row, pack

EXCHANGES = 200  # at most: each one makes the slower of two replicas faster
PARTNERS = 4  # replicas that the slowest one tries to exchange with, the fastest first


def exchange_documents(problem: Problem, deal: Deal) -> None:
    """Move or swap documents between the slowest replica and others while that makes the slower of the two faster."""
    times = [problem.replica_time(group) for group in deal]
    for _ in range(EXCHANGES):
        order = sorted(range(len(deal)), key=lambda replica: (times[replica], replica))
        slowest = order[-1]
        if times[slowest] <= problem.enough:
            break
        for other in order[: min(PARTNERS, len(order) - 1)]:
            mine, theirs = ([one for row in deal[replica] for one in row] for replica in (slowest, other))
            swapped = _swap(problem, mine, theirs, times[slowest] - times[other])
            if swapped is None:
                continue
            two = [pack(problem, group) for group in swapped]
            after = [problem.replica_time(group) for group in two]
            if max(after) < times[slowest]:
                deal[slowest], deal[other] = two
                times[slowest], times[other] = after
                break
        else:
            break


def _swap(problem: Problem, mine: Row, theirs: Row, gap: int) -> tuple[Row, Row] | None:
    """The documents of two replicas after the move or swap that comes nearest to closing the gap between them."""
    if gap <= 0:
        return None
    costs = np.array([problem.costs[one] for one in mine])
    back = np.array([0, *(problem.costs[one] for one in theirs)])  # 0: nothing comes back, a move
    order = np.argsort(back, kind="stable")
    below = np.searchsorted(back[order], costs - gap // 2, "right")
    best_at: tuple[int, int, int] | None = None
    for step in (-1, 0):
        at = order[np.clip(below + step, 0, len(back) - 1)]
        gain = costs - back[at]
        off = np.where((gain > 0) & (gain < gap), np.abs(2 * gain - gap), np.iinfo(np.int64).max)
        first = int(np.argmin(off))
        if 0 < gain[first] < gap and (best_at is None or int(off[first]) < best_at[0]):
            best_at = int(off[first]), first, int(at[first])
    if best_at is None:
        return None
    _, give, take = best_at
    left, right = mine[:give] + mine[give + 1 :], [*theirs, mine[give]]
    if take:
        left.append(theirs[take - 1])
        del right[take - 1]
    return (left, right) if left else None


def exchange_rows(problem: Problem, deal: Deal) -> Deal:
    """Swap whole micro-batches, then single documents that fit, between the slowest replica and others."""
    times = [problem.replica_time(group) for group in deal]
    for _ in range(EXCHANGES):
        order = sorted(range(len(deal)), key=lambda replica: (times[replica], replica))
        slowest = order[-1]
        if times[slowest] <= problem.enough:
            break
        for other in order[: min(PARTNERS, len(order) - 1)]:
            gap = times[slowest] - times[other]
            gain = _swap_rows(problem, deal[slowest], deal[other], gap) or _swap_fitting(
                problem, deal[slowest], deal[other], gap
            )
            if gain:
                times[slowest] -= gain
                times[other] += gain
                break
        else:
            break
    return deal


def _swap_rows(problem: Problem, mine: list[Row], theirs: list[Row], gap: int) -> int:
    """Swap the two micro-batches that come nearest to closing the gap; returns what that gains, 0: none does."""
    found = [(problem.time_of(a) - problem.time_of(b), i, j) for i, a in enumerate(mine) for j, b in enumerate(theirs)]
    useful = [one for one in found if 0 < one[0] < gap]
    if not useful:
        return 0
    gain, i, j = min(useful, key=lambda one: (abs(2 * one[0] - gap), one))
    mine[i], theirs[j] = theirs[j], mine[i]
    return gain


def _swap_fitting(problem: Problem, mine: list[Row], theirs: list[Row], gap: int) -> int:
    """Move or swap the documents that come nearest to closing the gap and fit; returns what that gains, 0: none."""
    best_at: tuple[int, int, int, int, int] | None = None
    for i, a in enumerate(mine):
        room_a = problem.bound - problem.tokens_of(a)
        costs_a, lengths_a = (np.array([of[one] for one in a], np.int64) for of in (problem.costs, problem.lengths))
        for j, b in enumerate(theirs):
            room_b = problem.bound - problem.tokens_of(b)
            costs_b, lengths_b = (
                np.array([0, *(of[one] for one in b)], np.int64) for of in (problem.costs, problem.lengths)
            )
            gain = costs_a[:, None] - costs_b
            grows = lengths_a[:, None] - lengths_b
            useful = (gain > 0) & (gain < gap) & (grows <= room_b) & (-grows <= room_a)
            if len(a) == 1:
                useful[:, 0] = False  # a micro-batch keeps at least one document
            if not useful.any():
                continue
            off = np.where(useful, np.abs(2 * gain - gap), np.iinfo(np.int64).max)
            at = int(np.argmin(off))
            x, y = divmod(at, off.shape[1])
            if best_at is None or int(off[x, y]) < best_at[0]:
                best_at = int(off[x, y]), i, j, x, y
    if best_at is None:
        return 0
    _, i, j, x, y = best_at
    one = mine[i].pop(x)
    gain_of = problem.costs[one]
    if y:
        other = theirs[j].pop(y - 1)
        mine[i].append(other)
        gain_of -= problem.costs[other]
    theirs[j].append(one)
    return gain_of
