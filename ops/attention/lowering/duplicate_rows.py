"""Target rows of the result of a call, where several rows of a result may have the same target."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.ops.attention.lowering.fused_call import HostRows, ScatterRows, as_host_rows, ramps


def scatter_rows(
    row: np.ndarray, rows: np.ndarray, start: np.ndarray, size: np.ndarray, is_reversed: np.ndarray
) -> ScatterRows:
    """Return the targets of the rows of a result.

    Rows with the same target are merged as a tree, the upper half into the lower one, so that n rows take log2(n)
    merges, each for all targets at once::

        0 1 2 3 4    3 -> 0, 4 -> 1
        0 1 2        2 -> 0
        0 1          1 -> 0

    Args:
        row: first target row of each block.
        rows: number of its target rows.
        start: first row of the block in the result.
        size: rows of the block in the result; those after the first `rows` are padding.
        is_reversed: 1 where the block is in reverse order in the call.
    """
    order = np.argsort(row, kind="stable")
    ends = row[order] + rows[order]
    if len(row) < 2 or bool((row[order][1:] >= np.maximum.accumulate(ends)[:-1]).all()):
        return ScatterRows((), *_unique_targets(start, rows, row, is_reversed))
    target, length, source, sign = _segments(row, rows, start, is_reversed)
    order = np.lexsort((np.arange(len(target)), target))  # by segment, then in the order of blocks
    target, length, source, sign = target[order], length[order], source[order], sign[order]
    begins = np.flatnonzero(np.append(True, target[1:] != target[:-1]))
    count = np.diff(np.append(begins, len(target)))
    first = np.repeat(begins, count)
    index = np.arange(len(target)) - first  # within the segment
    count = np.repeat(count, count)
    merges: list[tuple[HostRows, HostRows]] = []
    while count.max() > 1:
        half = (count + 1) // 2
        upper = np.flatnonzero(index >= half)
        lower = (first + index - half)[upper]
        into, merged = (ramps(source[segment], length[upper], sign[segment]) for segment in (lower, upper))
        merges.append((as_host_rows(into), as_host_rows(merged)))
        remains = index < half
        count = np.where(remains, half, 0)
        index = np.where(remains, index, -1)  # below every half from now on
    target, length, source, sign = target[begins], length[begins], source[begins], sign[begins]
    return ScatterRows(
        tuple(merges), as_host_rows(ramps(source, length, sign)), as_host_rows(ragged_arange(target, length))
    )


def _unique_targets(
    start: np.ndarray, rows: np.ndarray, row: np.ndarray, is_reversed: np.ndarray
) -> tuple[HostRows, HostRows]:
    """Return rows of the result and their targets, where all targets differ."""
    source = ragged_arange(start, rows)
    target = ramps(np.where(is_reversed == 1, row + rows - 1, row), rows, 1 - 2 * is_reversed)
    return as_host_rows(source), as_host_rows(target)


def _segments(
    row: np.ndarray, rows: np.ndarray, start: np.ndarray, is_reversed: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut the blocks where another one begins or ends.

    Returns:
        For each segment its first target row, its length, the row of the result for that target, and 1, or -1 where the
        rows of the result descend.
    """
    edges, edge_index = np.unique(np.stack([row, row + rows]), return_inverse=True)
    first, stop = edge_index.reshape(2, -1)
    segment = ragged_arange(first, stop - first)
    block = np.repeat(np.arange(len(row)), stop - first)
    target, length = edges[segment], edges[segment + 1] - edges[segment]
    offset = target - row[block]
    source = start[block] + np.where(is_reversed[block] == 1, rows[block] - 1 - offset, offset)
    return target, length, source, 1 - 2 * is_reversed[block]
