"""Exchanges between the slowest replica and others that improve an assignment."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.data.dispatch_problem import DispatchProblem, DocumentGroups, Row, best_fit_decreasing

#: Maximum number of exchanges; each one makes the slower of two replicas faster.
MAX_EXCHANGES = 200

#: Number of replicas, the fastest first, with which the slowest replica tries to exchange.
MAX_PARTNERS = 4


def improve_by_documents(problem: DispatchProblem, groups: DocumentGroups) -> None:
    """Move or swap documents between the slowest replica and others while that makes the slower of the two faster."""
    times = [problem.replica_time(group) for group in groups]
    for _ in range(MAX_EXCHANGES):
        slowest, partners = _slowest_and_partners(times)
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


def _slowest_and_partners(times: list[int]) -> tuple[int, list[int]]:
    """Return the slowest replica, and the replicas with which it tries to exchange."""
    order = sorted(range(len(times)), key=lambda replica: (times[replica], replica))
    return order[-1], order[: min(MAX_PARTNERS, len(order) - 1)]


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


def improve_by_rows(problem: DispatchProblem, groups: DocumentGroups) -> DocumentGroups:
    """Swap whole micro-batches between the slowest replica and others, or single documents where none improves."""
    times = [problem.replica_time(group) for group in groups]
    for _ in range(MAX_EXCHANGES):
        slowest, partners = _slowest_and_partners(times)
        if times[slowest] <= problem.good_enough_time:
            break
        for partner in partners:
            rows, partner_rows, gap = groups[slowest], groups[partner], times[slowest] - times[partner]
            gain = _swap_rows(problem, rows, partner_rows, gap) or _swap_documents(problem, rows, partner_rows, gap)
            if gain:
                times[slowest] -= gain
                times[partner] += gain
                break
        else:
            break
    return groups


def _swap_rows(problem: DispatchProblem, rows: list[Row], partner_rows: list[Row], gap: int) -> int:
    """Swap the two micro-batches that come nearest to closing the gap; return the time gained, 0 if none narrows it."""
    swaps = [
        (problem.time_of(row) - problem.time_of(partner_row), i, j)
        for i, row in enumerate(rows)
        for j, partner_row in enumerate(partner_rows)
    ]
    useful = [swap for swap in swaps if 0 < swap[0] < gap]
    if not useful:
        return 0
    gain, i, j = min(useful, key=lambda swap: (abs(2 * swap[0] - gap), swap))
    rows[i], partner_rows[j] = partner_rows[j], rows[i]
    return gain


def _swap_documents(problem: DispatchProblem, rows: list[Row], partner_rows: list[Row], gap: int) -> int:
    """Move or swap the documents that come nearest to closing the gap and fit into the micro-batches; return the time
    gained, 0 if none narrows the gap."""
    best: tuple[int, int, int, int, int] | None = None  # remaining gap, row, row of the partner, indices of documents
    for i, row in enumerate(rows):
        room, costs, lengths = _room_costs_lengths(problem, row)
        for j, partner_row in enumerate(partner_rows):
            partner_room, partner_costs, partner_lengths = _room_costs_lengths(problem, partner_row)
            # Column 0: a move, for which nothing comes back.
            gain = costs[:, None] - np.append(0, partner_costs)
            growth = lengths[:, None] - np.append(0, partner_lengths)
            useful = (gain > 0) & (gain < gap) & (growth <= partner_room) & (-growth <= room)
            if len(row) == 1:
                useful[:, 0] = False  # a micro-batch keeps at least one document
            if not useful.any():
                continue
            remaining = np.where(useful, np.abs(2 * gain - gap), np.iinfo(np.int64).max)
            given, taken = divmod(int(np.argmin(remaining)), remaining.shape[1])
            if best is None or int(remaining[given, taken]) < best[0]:
                best = int(remaining[given, taken]), i, j, given, taken
    if best is None:
        return 0
    _, i, j, given, taken = best
    document = rows[i].pop(given)
    gain = problem.costs[document]
    if taken:
        partner_document = partner_rows[j].pop(taken - 1)
        rows[i].append(partner_document)
        gain -= problem.costs[partner_document]
    partner_rows[j].append(document)
    return gain


def _room_costs_lengths(problem: DispatchProblem, row: Row) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the tokens that still fit into a micro-batch, and costs and lengths of its documents, int64."""
    costs, lengths = (
        np.array([values[document] for document in row], np.int64) for values in (problem.costs, problem.lengths)
    )
    return problem.token_bound - int(lengths.sum()), costs, lengths
