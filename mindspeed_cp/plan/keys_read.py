"""Rows of slots that tiles read: where slots hold latents, these rows alone are expanded to keys and values."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

#: Runs of rows, ascending and apart: first row and number of rows of each, int64 [runs] each.
Runs = tuple[np.ndarray, np.ndarray]


def number_keys_read(tiles: np.ndarray) -> tuple[np.ndarray, dict[tuple[int, int], Runs]]:
    """Number the keys of tiles among the rows that a step reads of a slot, instead of all rows of the slot.

    Args:
        tiles: records of dtype TILE of one rank, sorted by (step, slot).

    Returns:
        The tiles with new `k_row`, in their order; and the rows that are read, by (step, slot).
    """
    out, rows_read = tiles.copy(), {}
    if not len(tiles):
        return out, {}
    changes = (np.diff(tiles["step"]) != 0) | (np.diff(tiles["slot"]) != 0)
    borders = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(tiles)]]).tolist()
    for begin, end in pairwise(borders):
        group = tiles[begin:end]
        first, count = joined_runs(group["k_row"], group["k_rows"])
        run = np.searchsorted(first, group["k_row"], "right") - 1
        rows_before = np.cumsum(count) - count
        out["k_row"][begin:end] = group["k_row"] - first[run] + rows_before[run]
        rows_read[int(group["step"][0]), int(group["slot"][0])] = first, count
    return out, rows_read


def joined_runs(first: np.ndarray, count: np.ndarray) -> Runs:
    """Return the rows that are in any of some runs, as runs that neither overlap nor touch.

    Args:
        first, count: first row and number of rows of each run, in any order, int64 [runs] each.
    """
    order = np.argsort(first, kind="stable")
    first, last = first[order], np.maximum.accumulate((first + count)[order])
    begins = np.flatnonzero(np.append(True, first[1:] > last[:-1]))
    ends = np.append(begins[1:], len(first)) - 1
    return first[begins], last[ends] - first[begins]
