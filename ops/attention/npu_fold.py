"""Where the rows of a call's result belong, when several of them may belong to one row."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import expand
from mindspeed_cp.ops.attention.npu_calls import Back, Rows, compact, ramps


def back_of(row: np.ndarray, rows: np.ndarray, at: np.ndarray, size: np.ndarray, behind: np.ndarray) -> Back:
    """Where results belong.

    Rows that belong to one are folded as a tree, the upper half into the lower one, so that n of them take log2(n)
    rounds, each for all rows at once::

        0 1 2 3 4    3 -> 0, 4 -> 1
        0 1 2        2 -> 0
        0 1          1 -> 0

    Args:
        row: first row that each block belongs to.
        rows: how many.
        at: first row of the block in the call's result.
        size: of the block there; rows after the first `rows` are padding.
        behind: 1 where the block is in reverse order in the call.
    """
    order = np.argsort(row, kind="stable")
    ends = row[order] + rows[order]
    if len(row) < 2 or bool((row[order][1:] >= np.maximum.accumulate(ends)[:-1]).all()):
        return Back((), *_pairs(at, rows, row, behind))
    target, length, source, sign = _segments(row, rows, at, behind)
    order = np.lexsort((np.arange(len(target)), target))  # by segment, then in the order of blocks
    target, length, source, sign = target[order], length[order], source[order], sign[order]
    begins = np.flatnonzero(np.append(True, target[1:] != target[:-1]))
    many = np.diff(np.append(begins, len(target)))
    first = np.repeat(begins, many)
    turn = np.arange(len(target)) - first
    many = np.repeat(many, many)
    folds: list[tuple[Rows, Rows]] = []
    while many.max() > 1:
        half = (many + 1) // 2
        upper = np.flatnonzero(turn >= half)
        lower = (first + turn - half)[upper]
        into, out_of = (ramps(source[one], length[upper], sign[one]) for one in (lower, upper))
        folds.append((compact(into), compact(out_of)))
        left = turn < half
        many = np.where(left, half, 0)
        turn = np.where(left, turn, -1)  # no longer above any half
    target, length, source, sign = target[begins], length[begins], source[begins], sign[begins]
    return Back(tuple(folds), compact(ramps(source, length, sign)), compact(expand(target, length)))


def _pairs(at: np.ndarray, rows: np.ndarray, row: np.ndarray, behind: np.ndarray) -> tuple[Rows, Rows]:
    """Rows of the result, and the rows they belong to."""
    source = expand(at, rows)
    target = ramps(np.where(behind == 1, row + rows - 1, row), rows, 1 - 2 * behind)
    return compact(source), compact(target)


def _segments(
    row: np.ndarray, rows: np.ndarray, at: np.ndarray, behind: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The blocks, cut where another one begins or ends: first row each piece belongs to, its length, and the row of the
    result that belongs to that first row; 1, or -1 where the others come before it."""
    edges, places = np.unique(np.stack([row, row + rows]), return_inverse=True)
    start, stop = places.reshape(2, -1)
    segment = expand(start, stop - start)
    of = np.repeat(np.arange(len(row)), stop - start)
    target, length = edges[segment], edges[segment + 1] - edges[segment]
    inside = target - row[of]
    source = at[of] + np.where(behind[of] == 1, rows[of] - 1 - inside, inside)
    return target, length, source, 1 - 2 * behind[of]
