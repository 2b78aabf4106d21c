"""Assignment of items to the least loaded bins, against one that looks at all bins for every item."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.layout import assign_to_least_loaded

Item = tuple[int, int, int]  # cost, tie, size
Bin = tuple[int, int]  # load, filled


def looked_at_one_by_one(
    items: list[Item], bins: list[Bin], bound: float, order: Sequence[int]
) -> tuple[list[int], list[float], list[float]]:
    """Bin of each item, and the loads and what is filled afterwards."""
    loads, filled, ties = [float(load) for load, _ in bins], [float(full) for _, full in bins], [0] * len(bins)
    owners = []
    for cost, tie, size in items:
        with_room = [number for number in range(len(bins)) if filled[number] + size <= bound]
        if not with_room:
            break
        number = min(with_room, key=lambda number: (loads[number], ties[number], order.index(number)))
        loads[number] += cost
        ties[number] += tie
        filled[number] += size
        owners.append(number)
    return owners, loads, filled


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 12)), max_size=25),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=6),
    st.sampled_from([0, 7, 12, 30, float("inf")]),
    st.booleans(),
    st.none() | st.randoms(use_true_random=False),
)
def test_the_least_loaded_bin_with_room_takes_each_item(
    items: list[Item], bins: list[Bin], bound: float, largest_first: bool, shuffled: Random | None
) -> None:
    if largest_first:
        items = sorted(items, key=lambda item: -item[2])
    loads, filled = ([float(bin[field]) for bin in bins] for field in (0, 1))
    costs, ties, sizes = ([item[field] for item in items] for field in range(3))
    order = None if shuffled is None else shuffled.sample(range(len(bins)), len(bins))
    owners = assign_to_least_loaded(costs, loads, ties=ties, sizes=sizes, filled=filled, bound=bound, order=order)
    assert (owners, loads, filled) == looked_at_one_by_one(items, bins, bound, order or range(len(bins)))


def test_a_bin_without_room_for_one_item_gets_a_smaller_one() -> None:
    loads, filled = [0.0, 5.0], [8.0, 0.0]
    owners = assign_to_least_loaded([1.0] * 3, loads, sizes=[6, 2, 1], filled=filled, bound=10)
    assert owners == [1, 0, 1]  # bin 0 is full after the second
    assert loads == pytest.approx([1, 7])
    assert filled == [10, 7]
