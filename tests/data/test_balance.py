"""Documents of a global batch over replicas and micro-batches: the laws of every assignment, and how good they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.dispatch_baselines import first_fit, in_order, karmarkar_karp
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.data.balance import Assignment, DocumentCost, assign
from mindspeed_cp.data.dispatch import Dispatcher
from mindspeed_cp.data.stream import DOC_CHUNK
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.problem import visible_pairs
from tests.data.corpora import law

BOUND = 64
METHODS: dict[str, Callable[..., Assignment]] = {
    "time": assign, "in_order": in_order, "first_fit": first_fit, "karmarkar_karp": karmarkar_karp,
}  # fmt: skip
lengths_lists = st.lists(st.integers(0, BOUND), max_size=60)
replica_counts = st.integers(1, 9)
fixed_times = st.sampled_from([0.0, 0.5, 40.0, 5000.0])


def square(lengths: np.ndarray) -> np.ndarray:
    """3 n + n^2"""
    return 3.0 * lengths + lengths * lengths.astype(np.float64)


def rows_in_order(lengths: Sequence[int], replicas: int, count: int | None = None) -> list[int]:
    """Row of each document, rows filled one after the other up to BOUND."""
    rows, room, row = [], BOUND, 0
    for length in lengths:
        if length > room:
            row, room = row + 1, BOUND
        rows.append(row)
        room -= length
    return rows


# laws


@law
@given(st.sampled_from([*METHODS]), lengths_lists, replica_counts, fixed_times)
@example(next(iter(METHODS)), [BOUND - 5, 6], 1, 0.0)  # one token too many for a second document
def test_every_document_is_in_one_micro_batch_within_the_bound(
    method: str, lengths: list[int], replicas: int, fixed: float
) -> None:
    assignment = METHODS[method](lengths, square, replicas, token_bound=BOUND, per_micro_batch=fixed)
    assert len(assignment.counts) == len(assignment.seconds) == replicas
    rows = [row for group in assignment.micro_batches for row in group]
    assert sorted(document for row in rows for document in row.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[document] for document in row) <= BOUND for row in rows)
    costs = square(np.array(lengths, np.int64))
    for replica in range(replicas):
        own_rows = assignment.micro_batches[replica]
        expected = sum(costs[row].sum() + fixed for row in own_rows)
        assert assignment.seconds[replica] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@law
@given(lengths_lists, replica_counts, fixed_times)
@example([9, 37, 18], 3, 0.5)
@example([27, 30, 5], 4, 0.0)
def test_no_replica_is_idle_while_there_are_documents_for_all(lengths: list[int], replicas: int, fixed: float) -> None:
    assignment = assign([n + 1 for n in lengths], square, replicas, token_bound=BOUND + 1, per_micro_batch=fixed)
    assert sum(count > 0 for count in assignment.counts) == min(replicas, len(lengths))


@law
@given(lengths_lists.filter(any), replica_counts, fixed_times)
def test_it_is_never_worse_than_the_documents_as_they_came(lengths: list[int], replicas: int, fixed: float) -> None:
    rows = rows_in_order(lengths, replicas)
    before = in_order(lengths, square, replicas, token_bound=BOUND, per_micro_batch=fixed, rows=rows)
    after = assign(lengths, square, replicas, token_bound=BOUND, per_micro_batch=fixed, rows=rows)
    occupied = min(replicas, sum(1 for n in lengths if n))
    if sum(count > 0 for count in before.counts) >= occupied:  # else more replicas are given something to do
        assert after.seconds.max() <= before.seconds.max() * (1 + 1e-9)
    bound = max(square(np.array(lengths)).max() + fixed, (square(np.array(lengths)).sum() + fixed) / replicas)
    assert after.seconds.max() >= bound * (1 - 1e-9)


@law
@given(lengths_lists, st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_equal_counts_are_kept_where_the_rows_fill_them(
    lengths: list[int], replicas: int, micro_batches: int, random: Any
) -> None:
    """Rows of at least one document each, as a packer makes them."""
    rows: list[list[int]] = []
    for _ in range(replicas * micro_batches):
        rows.append([random.randint(1, 20) for _ in range(random.randint(1, 3))])
    flat = [n for row in rows for n in row]
    row_of_document = [number for number, row in enumerate(rows) for _ in row]
    common: dict[str, Any] = dict(token_bound=BOUND, per_micro_batch=1.0, rows=row_of_document)
    before = in_order(flat, square, replicas, **common)
    equal = assign(flat, square, replicas, **common, equal_counts=True)
    assert len(set(equal.counts)) == 1 and equal.seconds.max() <= before.seconds.max() * (1 + 1e-9)
    assert all(len(row) for group in equal.micro_batches for row in group)


@law
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), replica_counts)
def test_equal_counts_without_rows_are_kept_or_refused(lengths: list[int], replicas: int) -> None:
    try:
        equal = assign(lengths, square, replicas, token_bound=20, equal_counts=True)
    except ConfigError as error:
        assert "equal_counts" in str(error)
        return
    assert len(set(equal.counts)) == 1
    assert all(len(row) for group in equal.micro_batches for row in group)


def same_groups(a: Assignment, b: Assignment) -> bool:
    return repr(a.micro_batches) == repr(b.micro_batches)


@law
@given(lengths_lists, replica_counts, fixed_times, st.sampled_from([1.0, 3.0, 1e-9, 7e12]))
def test_the_same_costs_in_any_unit_give_the_same_assignment(
    lengths: list[int], replicas: int, fixed: float, unit: float
) -> None:
    first, again, scaled = (
        assign(
            np.array(lengths, np.int64), square(np.array(lengths, np.int64)) * factor, replicas,
            token_bound=BOUND, per_micro_batch=fixed * factor,
        )
        for factor in (1.0, 1.0, unit)
    )  # fmt: skip
    assert same_groups(first, again)
    assert scaled.seconds.max() == pytest.approx(first.seconds.max() * unit, rel=1e-6)


@law
@given(lengths_lists.filter(any), replica_counts)
def test_costs_that_differ_in_the_last_bits_decide_alike(lengths: list[int], replicas: int) -> None:
    """Another machine may sum in another order; whole numbers of 2**-40 of the largest cost hide that."""
    costs = np.floor(square(np.array(lengths)) * 7)
    nudged = costs * (1 + 2.0**-50)
    exact, other = (assign(lengths, values, replicas, token_bound=BOUND) for values in (costs, nudged))
    assert same_groups(exact, other)


@settings(law, max_examples=40)
@given(st.lists(st.integers(1, BOUND), min_size=1, max_size=7), st.integers(1, 3))
def test_small_cases_are_within_a_sixth_of_the_best_there_is(lengths: list[int], replicas: int) -> None:
    """Longest first alone promises a third (Graham 1969)."""
    costs = square(np.array(lengths))
    best = min(
        max(sum(costs[i] for i, r in enumerate(choice) if r == replica) for replica in range(replicas))
        for choice in itertools.product(range(replicas), repeat=len(lengths))
    )
    assert assign(lengths, costs, replicas, token_bound=BOUND).seconds.max() <= best * (1 + 1 / 6)


# worst cases


def test_one_giant_document_has_a_replica_to_itself() -> None:
    lengths = [BOUND, *[4] * 40]
    assignment = assign(lengths, square, 4, token_bound=BOUND)
    assert assignment.seconds.max() == pytest.approx(square(np.array([BOUND]))[0])
    assert [[0]] in [[row.tolist() for row in group] for group in assignment.micro_batches]


def test_no_documents_and_more_replicas_than_documents() -> None:
    empty = assign([], square, 3, token_bound=8)
    assert empty.counts == (0, 0, 0) and not empty.seconds.any() and empty.micro_batches[2] == []
    few = assign([5, 3], square, 4, token_bound=8)
    assert sorted(few.counts) == [0, 0, 1, 1]


def test_it_beats_packing_by_tokens_and_is_at_least_about_as_good_as_differencing() -> None:
    """Over 20 batches of lognormal lengths; the numbers of `python -m benchmarks.balance` are of this kind."""
    random = np.random.default_rng(1)
    ratios: dict[str, list[float]] = {"first_fit": [], "karmarkar_karp": [], "in_order": []}
    for _ in range(20):
        lengths = np.clip(random.lognormal(np.log(300), 1.5, 250), 16, 8192).astype(np.int64)
        common: dict[str, Any] = dict(token_bound=8192, per_micro_batch=1e3)
        own = assign(lengths, lambda n: n + n * n / 4096, 8, **common)
        for name in ratios:
            ratios[name].append(
                METHODS[name](lengths, lambda n: n + n * n / 4096, 8, **common).seconds.max() / own.seconds.max()
            )
    assert min(ratios["first_fit"]) >= 1 - 1e-9 and np.mean(ratios["first_fit"]) > 1.05
    assert np.mean(ratios["in_order"]) > 1.1
    assert np.mean(ratios["karmarkar_karp"]) >= 1 - 1e-3 and min(ratios["karmarkar_karp"]) > 0.99


# costs


@law
@given(st.integers(0, 60), st.integers(-1, 70), st.sampled_from(["causal", "full"]), st.integers(-1, 9))
def test_visible_pairs_are_counted_exactly(length: int, left: int, mask: str, right: int) -> None:
    window = (left, 0 if mask == "causal" else right)
    attention = AttentionConfig(1, mask=mask, window=window)
    reach = attention.visible_range
    pairs = sum(1 for q in range(length) for k in range(length) if -reach[1] <= q - k <= reach[0])
    assert visible_pairs(np.array([length]), np.array([length]), attention)[0] == pairs


def test_a_document_costs_more_than_in_proportion_and_less_with_a_window_or_more_ranks() -> None:
    attention = AttentionConfig(32, 8)
    layers = ((attention, LayerCost.for_attention(attention)),) * 4
    lengths = np.array([0, 100, 4096, 8192, 65536])
    cost = DocumentCost(load_cluster("a2"), layers)
    seconds = cost(lengths)
    assert seconds[0] == 0 and seconds[3] > 2 * seconds[2] > 0 and seconds[4] > 10 * seconds[3]
    assert DocumentCost(load_cluster("a2"), layers[:2])(lengths) == pytest.approx(seconds / 2)
    window = AttentionConfig(32, 8, window=(128, 0))
    assert (DocumentCost(load_cluster("a2"), ((window, layers[0][1]),) * 4)(lengths)[2:] < seconds[2:]).all()
    split = DocumentCost(load_cluster("a2"), layers, ranks=8)
    whole = DocumentCost(load_cluster("a2"), layers, ranks=8, whole_documents=True)
    assert whole(lengths) == pytest.approx(seconds / 8) and (split(lengths)[1:] > whole(lengths)[1:]).all()
    again = DocumentCost(load_cluster("a2"), layers, recomputed=(1, 1))
    assert 1.2 < (again(lengths)[1:] / seconds[1:]).min() <= (again(lengths)[1:] / seconds[1:]).max() < 1.4
    assert split.per_micro_batch > cost.per_micro_batch > 0


# assigning the rows of a global batch


def pieces(*rows: Sequence[int]) -> list[np.ndarray]:
    """Rows of pieces, each of a document of its own."""
    numbers = itertools.count()
    return [np.array([(next(numbers), 0, length) for length in row], DOC_CHUNK) for row in rows]


def test_none_deals_rows_in_turn_and_time_deals_documents() -> None:
    rows = pieces([60], [20, 20, 20], [60], [5, 5], [60], [3], [9, 9], [1])
    turn = Dispatcher("none", 2, BOUND, square)(rows)
    assert [[row.tolist() for row in replica_rows] for replica_rows in turn.micro_batches] == [
        [[0], [4], [7], [9, 10]],
        [[1, 2, 3], [5, 6], [8], [11]],
    ]
    assert turn.seconds.tolist() == pytest.approx([square(np.array([60, 60, 60, 9, 9])).sum(), turn.seconds[1]])
    by_time = Dispatcher("time", 2, BOUND, square)(rows)
    assert by_time.imbalance < turn.imbalance and by_time.digest != turn.digest
    equal = Dispatcher("time", 2, BOUND, square, equal_counts=True)(rows)
    assert (
        len({len(replica_rows) for replica_rows in equal.micro_batches}) == 1
        and by_time.seconds.max() <= equal.seconds.max()
    )
    assert by_time.digest == Dispatcher("time", 2, BOUND, square)(rows).digest
    assert 0 <= by_time.digest < 2**52 and float(by_time.digest) == by_time.digest


# bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"lengths": [5, 65]}, "document 1 has 65 tokens, and a micro-batch at most 64; cut it, or raise the bound"),
        ({"lengths": [5, -1]}, "lengths: -1 at 1; valid: finite numbers, 0 or more"),
        ({"lengths": [[5]]}, "lengths must be a flat list of whole numbers, not int64 of shape [1, 1]"),
        ({"lengths": [0.5]}, "lengths must be a flat list of whole numbers, not float64"),
        ({"cost": [1.0]}, "cost has 1 numbers for 3 documents; give one for each"),
        ({"cost": [1.0, float("nan"), 2.0]}, "cost: nan at 1; valid: finite numbers, 0 or more"),
        ({"cost": [1.0, -2.0, 2.0]}, "cost: -2.0 at 1"),
        ({"per_micro_batch": -1.0}, "per_micro_batch: -1.0 at 0"),
        ({"rows": [0, 1]}, "rows has 2 numbers for 3 documents; give one for each"),
        (
            {"lengths": [40, 40, 40], "rows": [0, 0, 1], "equal_counts": True},
            "equal_counts: 3 documents of 120 tokens were not packed into equally many micro-batches of 64 tokens on 2 ",
        ),
    ],
)
def test_the_error_of_an_argument_out_of_range_has_its_name(arguments: dict[str, Any], says: str) -> None:
    given_arguments: dict[str, Any] = {
        "lengths": [5, 6, 7], "cost": square, "replicas": 2, "token_bound": BOUND, **arguments,
    }  # fmt: skip
    with pytest.raises(ConfigError) as error:
        assign(**given_arguments)
    assert says in str(error.value) and "\n" not in str(error.value)
