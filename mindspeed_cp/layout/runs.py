"""Arrays of integers: runs [first, last plus one) are concatenated, joined, united and intersected."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np

from mindspeed_cp.errors import ConfigError

#: Rows src_row .. src_row + rows - 1 of a source become rows dst_row .. dst_row + rows - 1 of a target.
ROW_RUN = np.dtype([(name, np.int64) for name in ("src_row", "dst_row", "rows")])


def concatenate_records(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate one or more arrays of one record dtype.

    np.concatenate derives a common dtype first, field by field, which takes longer than to copy some hundred records.
    """
    out = np.empty(sum(map(len, tables)), tables[0].dtype)
    begin = 0
    for table in tables:
        out[begin : begin + len(table)] = table
        begin += len(table)
    return out


def ragged_arange(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Concatenate the integers of several runs: ``ragged_arange([5, 0], [2, 1]) == [5, 6, 0]``."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - ends + count, count) + np.arange(total, dtype=np.int64)


def join_runs(
    runs: np.ndarray, sides: Sequence[str], breaks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Join each run to the one before it where it continues that run on every side.

    Args:
        runs: records with the field `rows` and one field of first rows for each side.
        sides: names of the fields of first rows.
        breaks: bool [n], True for runs that must not be joined to the one before.

    Returns:
        The joined runs, and the index of the first input run of each.
    """
    starts_new = np.zeros(len(runs), bool) if breaks is None else breaks.copy()
    starts_new[:1] = True
    for side in sides:
        starts_new[1:] |= runs[side][1:] != runs[side][:-1] + runs["rows"][:-1]
    begins = np.flatnonzero(starts_new)
    out = runs[begins]
    if len(out):
        out["rows"] = np.add.reduceat(runs["rows"], begins)
    return out, begins


def group_starts(*keys: np.ndarray) -> np.ndarray:
    """Return the indices at which a new combination of values begins, in columns that are sorted together."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    is_start = np.ones(len(keys[0]), bool)
    is_start[1:] = keys[0][1:] != keys[0][:-1]
    for key in keys[1:]:
        is_start[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(is_start)


def union_of_runs(runs: np.ndarray) -> np.ndarray:
    """Unite runs [n, 2] given in any order into ascending runs that neither touch nor overlap; drop empty runs."""
    runs = runs[runs[:, 1] > runs[:, 0]]
    if len(runs) < 2:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    end = np.maximum.accumulate(runs[:, 1])
    begins = np.flatnonzero(np.append(True, runs[1:, 0] > end[:-1]))
    return np.stack([runs[begins, 0], end[np.append(begins[1:], len(runs)) - 1]], 1)


def intersect_runs(
    a_first: np.ndarray, a_last: np.ndarray, b_first: np.ndarray, b_last: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Intersect two lists of runs. The runs of list b ascend and do not overlap; those of list a may be in any order.

    Args:
        a_first, a_last: first and last-plus-one integer of each run of list a, int64 [n].
        b_first, b_last: the same for list b, int64 [m].

    Returns:
        Index of the run in a, index of the run in b, first and last-plus-one integer of each overlap; by index in a.
    """
    b_begin = np.searchsorted(b_last, a_first, "right")
    count = np.where(a_last > a_first, np.maximum(np.searchsorted(b_first, a_last, "left") - b_begin, 0), 0)
    a, b = np.repeat(np.arange(len(a_first)), count), ragged_arange(b_begin, count)
    first, last = np.maximum(a_first[a], b_first[b]), np.minimum(a_last[a], b_last[b])
    nonempty = last > first
    return a[nonempty], b[nonempty], first[nonempty], last[nonempty]


def as_integers(name: str, values: Any, dims: int, shape: str = "") -> np.ndarray:
    """Convert to int64 with 1 to `dims` dimensions, or raise ConfigError, which names the valid shape."""
    try:
        is_array = hasattr(values, "__array__") or not isinstance(values, Iterable)
        array = np.asarray(values if is_array else list(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name} is a {type(values).__name__} that NumPy cannot read ({' '.join(str(error).split())}); valid: "
            "integers on the host: an array, a list, or tensor.cpu()"
        ) from None
    is_integer = np.issubdtype(array.dtype, np.integer) or array.size == 0
    if not is_integer or not 1 <= array.ndim <= dims:
        valid = shape or ("one dimension" if dims == 1 else "shape [tokens] or [rows, tokens]")
        raise ConfigError(f"{name} is {array.dtype} of shape {list(array.shape)}; valid: integers of {valid}")
    return array.astype(np.int64)  # a copy


# assign_to_least_loaded: how documents find a rank, and micro-batches a replica.


def assign_to_least_loaded(
    costs: Sequence[float],
    loads: list[float],
    *,
    ties: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    filled: list[float] | None = None,
    bound: float = math.inf,
    order: Sequence[int] | None = None,
) -> list[int]:
    """Assign items in the given order, each to the bin with the least load. Given by descending cost, the busiest bin
    is at most 4/3 times as loaded as it must be (Graham 1969).

    Args:
        costs: what each item adds to the load of its bin.
        loads: load of each bin before; what the items add is added.
        ties: of bins with equal load the one whose items have the least sum of these is taken, then the first one.
        sizes: how much of the bound each item takes; 1 if not given.
        filled: how much of the bound each bin has taken before; what the items take is added.
        bound: most that a bin takes.
        order: all bins; of equal ones the first here is taken. Default: ascending.

    Returns:
        The bin of each item, up to the first item that no bin has room for.
    """
    filled = [0.0] * len(loads) if filled is None else filled
    order = range(len(loads)) if order is None else order
    heap = [(loads[number], 0, place, number) for place, number in enumerate(order)]
    heapq.heapify(heap)
    without_room: list[tuple[float, tuple[float, int, int, int]]] = []  # by negative room: the most room comes first
    bins: list[int] = []
    for cost, tie, size in zip(costs, ties or repeat(0), sizes or repeat(1), strict=False):
        while without_room and -without_room[0][0] >= size:
            heapq.heappush(heap, heapq.heappop(without_room)[1])
        while heap and bound - filled[heap[0][3]] < size:
            entry = heapq.heappop(heap)
            heapq.heappush(without_room, (filled[entry[3]] - bound, entry))
        if not heap:
            break
        load, sum_of_ties, place, number = heap[0]
        heapq.heapreplace(heap, (load + cost, sum_of_ties + tie, place, number))
        filled[number] += size
        bins.append(number)
    for load, _, _, number in chain(heap, (entry for _, entry in without_room)):
        loads[number] = load
    return bins
