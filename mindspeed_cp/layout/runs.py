"""Runs of numbers, [first, last plus one]: their union and their overlaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def expand(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The numbers of several runs in a row: expand([5, 0], [2, 1]) == [5, 6, 0]."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - ends + count, count) + np.arange(total, dtype=np.int64)


def joined(runs: np.ndarray, sides: Sequence[str], breaks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Runs that continue the one before on every side become one with it.

    Args:
        runs: records with the fields `rows` and, for each side, its first row.
        sides: names of the fields of first rows.
        breaks: bool [n], True where a run begins something new and is never joined to the one before.

    Returns:
        The joined runs, and for each the number of its first run.
    """
    new = np.zeros(len(runs), bool) if breaks is None else breaks.copy()
    new[:1] = True
    for side in sides:
        new[1:] |= runs[side][1:] != runs[side][:-1] + runs["rows"][:-1]
    begins = np.flatnonzero(new)
    out = runs[begins]
    if len(out):
        out["rows"] = np.add.reduceat(runs["rows"], begins)
    return out, begins


def merged(runs: np.ndarray) -> np.ndarray:
    """Runs [n, 2] in any order as ascending runs that neither touch nor overlap; empty ones are left out."""
    runs = runs[runs[:, 1] > runs[:, 0]]
    if len(runs) < 2:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    end = np.maximum.accumulate(runs[:, 1])
    begins = np.flatnonzero(np.append(True, runs[1:, 0] > end[:-1]))
    return np.stack([runs[begins, 0], end[np.append(begins[1:], len(runs)) - 1]], 1)


def overlaps(
    first: np.ndarray, last: np.ndarray, other_first: np.ndarray, other_last: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where two lists of runs, each ascending and without overlaps of its own, meet.

    Args:
        first, last: first and last-plus-one number of each run of one list, int64 [n].
        other_first, other_last: of the other list, int64 [m].

    Returns:
        For each overlap, ascending: the number of the run in the one list and in the other, and the overlap's first and
        last-plus-one number.
    """
    lo = np.searchsorted(other_last, first, "right")
    count = np.where(last > first, np.maximum(np.searchsorted(other_first, last, "left") - lo, 0), 0)
    one, other = np.repeat(np.arange(len(first)), count), expand(lo, count)
    a, b = np.maximum(first[one], other_first[other]), np.minimum(last[one], other_last[other])
    real = b > a
    return one[real], other[real], a[real], b[real]
