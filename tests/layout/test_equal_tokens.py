"""The layout of linear layers: equal token counts by the fewest rows across nodes, compared with linear programs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.layout import Layout, Redistribution, contiguous, equal_tokens, zigzag
from mindspeed_cp.layout.remap import OBJECTIVES, Flows, equal_token_flows, equal_token_layout

#: Only these tests need scipy: without it the others run, those of GPUs for instance.
linprog = pytest.importorskip("scipy.optimize", reason="the package scipy is not installed").linprog

PRICE = 8.0  # of a row across nodes; inside a node it is 1


def transport(counts: np.ndarray, per: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The transport problem over all pairs of ranks (the diagonal: rows that stay): what leaves a rank, what arrives at
    one, and which pairs cross nodes. Unknowns are flattened [src, dst]."""
    ranks = len(counts)
    leaves = np.kron(np.eye(ranks), np.ones(ranks))
    arrives = np.kron(np.ones(ranks), np.eye(ranks))
    node = np.arange(ranks) // per
    return leaves, arrives, (node[:, None] != node).reshape(-1)


def cheapest(counts: np.ndarray, per: int, price: float) -> float:
    """The least cost of any move to equal counts, whichever ranks get one token more."""
    leaves, arrives, crosses = transport(counts, per)
    cost = np.where(crosses, price, 1.0)
    cost[:: len(counts) + 1] = 0.0
    share, extra = divmod(int(counts.sum()), len(counts))
    return solved(
        cost,
        A_ub=np.concatenate([arrives, -arrives]),
        b_ub=np.concatenate([np.full(len(counts), share + (extra > 0)), np.full(len(counts), -share)]),
        A_eq=leaves,
        b_eq=counts,
    )


def smallest_peak(counts: np.ndarray, targets: np.ndarray, per: int) -> float:
    """The least possible largest number of rows that one rank sends, or receives, across nodes."""
    leaves, arrives, crosses = transport(counts, per)
    peak = -np.ones((2 * len(counts), 1))
    return solved(
        np.append(np.zeros(leaves.shape[1]), 1.0),
        A_ub=np.hstack([np.concatenate([leaves * crosses, arrives * crosses]), peak]),
        b_ub=np.zeros(2 * len(counts)),
        A_eq=np.hstack([np.concatenate([leaves, arrives]), np.zeros((2 * len(counts), 1))]),
        b_eq=np.concatenate([counts, targets]),
    )


def cheapest_under(peak: int, counts: np.ndarray, targets: np.ndarray, per: int) -> float:
    """The least cost of a move to the targets where no rank sends or receives more than `peak` rows across nodes."""
    leaves, arrives, crosses = transport(counts, per)
    cost = np.where(crosses, PRICE, 1.0)
    cost[:: len(counts) + 1] = 0.0
    return solved(
        cost,
        A_ub=np.concatenate([leaves * crosses, arrives * crosses]),
        b_ub=np.full(2 * len(counts), peak),
        A_eq=np.concatenate([leaves, arrives]),
        b_eq=np.concatenate([counts, targets]),
    )


def solved(cost: np.ndarray, **constraints: np.ndarray) -> float:
    found = linprog(cost, **constraints, method="highs")
    assert found.status == 0, found.message
    return float(found.fun)


def cost_of(found: Flows, price: float) -> float:
    rows = found.flows["rows"]
    return float(rows.sum() + (price - 1) * rows[found.crosses].sum())


def peak_of(found: Flows) -> int:
    return int(max(found.rows(side, across=True).max() for side in ("src", "dst")))


def counts_of(seed: int, ranks: int) -> np.ndarray:
    """Random counts: even, skewed, or mostly empty."""
    random = np.random.default_rng(seed)
    kind = seed % 3
    if kind == 0:
        return random.integers(0, 200, ranks)
    if kind == 1:
        return (random.pareto(0.8, ranks) * 40).astype(np.int64)
    return random.integers(0, 90, ranks) * (random.random(ranks) < 0.3)


CASES = [
    (nodes, per, seed)
    for nodes, per in [(1, 2), (1, 7), (2, 1), (2, 4), (3, 3), (4, 5), (2, 16), (4, 8)]
    for seed in range(6)
]


@pytest.mark.parametrize(("nodes", "per", "seed"), CASES)
def test_no_linear_program_moves_less(nodes: int, per: int, seed: int) -> None:
    counts = counts_of(seed, nodes * per)
    found = equal_token_flows(counts, per, "sum")
    for price in (2.0, PRICE):
        assert cost_of(found, price) == pytest.approx(cheapest(counts, per, price), abs=1e-6)


@pytest.mark.parametrize(("nodes", "per", "seed"), CASES)
def test_no_linear_program_has_a_smaller_peak_across_nodes(nodes: int, per: int, seed: int) -> None:
    counts = counts_of(seed, nodes * per)
    found, fewest = equal_token_flows(counts, per, "minmax"), equal_token_flows(counts, per, "sum")
    assert np.array_equal(found.targets, fewest.targets)
    peak = peak_of(found)
    assert peak == np.ceil(smallest_peak(counts, found.targets, per) - 1e-6)
    assert cost_of(found, PRICE) == pytest.approx(cheapest_under(peak, counts, found.targets, per), abs=1e-6)
    assert found.flows["rows"][found.crosses].sum() == fewest.flows["rows"][fewest.crosses].sum()


def test_the_objectives_differ() -> None:
    """One rank has all the surplus: the others send rows of their own across, and get as many from it."""
    counts = np.array([18, 4, 4, 2, 8, 3, 1, 0])
    few, level = (equal_token_flows(counts, 4, objective) for objective in OBJECTIVES)
    assert (peak_of(few), peak_of(level)) == (8, 2)
    assert (few.flows["rows"].sum(), level.flows["rows"].sum()) == (16, 24)


counts_strategy = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(counts_strategy, st.data(), st.sampled_from(OBJECTIVES))
def test_rows_are_conserved_and_equal_up_to_one(counts: list[int], data: st.DataObject, objective: str) -> None:
    per = data.draw(st.sampled_from([n for n in range(1, len(counts) + 1) if len(counts) % n == 0]))
    found = equal_token_flows(np.array(counts), per, objective)
    after = np.array(counts, np.int64)
    np.subtract.at(after, found.flows["src"], found.flows["rows"])
    np.add.at(after, found.flows["dst"], found.flows["rows"])
    assert np.array_equal(after, found.targets)
    assert after.max() - after.min() <= 1 and after.sum() == sum(counts)
    assert (found.flows["rows"] > 0).all()
    inside = found.flows[~found.crosses]
    assert not set(inside["src"]) & set(inside["dst"])  # nobody gives and takes in its own node
    pairs = list(zip(found.flows["src"], found.flows["dst"], strict=True))
    assert pairs == sorted(set(pairs))
    again = equal_token_flows(np.array(counts), per, objective)
    assert np.array_equal(found.flows, again.flows)
    if max(counts) - min(counts) <= 1:
        assert not len(found.flows)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=8), st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (2, 5)]), st.randoms(),
    st.sampled_from(OBJECTIVES),
)  # fmt: skip
def test_a_layout_keeps_its_laws_and_its_rows(lengths, nodes, random, objective) -> None:  # type: ignore[no-untyped-def]
    documents, ranks = Documents(lengths), nodes[0] * nodes[1]
    groups = [random.sample(range(ranks), random.randint(1, ranks)) for _ in lengths]
    source = random.choice((zigzag, contiguous))(documents, ranks, groups)
    target = equal_token_layout(source, nodes[1], objective)
    target.check()
    counts = target.token_counts
    assert counts.max() - counts.min() <= 1
    flows = equal_token_flows(source.token_counts, nodes[1], objective)
    assert moved_rows(source, target) == {(f["src"], f["dst"]): f["rows"] for f in flows.flows}
    assert equal_token_layout(source, nodes[1], objective).same_as(target)
    assert equal_token_layout(target, nodes[1], objective) is target
    x = np.arange(documents.tokens)
    assert np.array_equal(target.unshard([target.shard(x, rank) for rank in range(ranks)]), x)


def moved_rows(source: Layout, target: Layout) -> dict[tuple[int, int], int]:
    """Rows that go from one rank to another, as the redistribution has them."""
    move = Redistribution.between(source, target, 1)
    if move is None:
        return {}
    return {(p["src"], p["dst"]): p["rows"] for p in move.parts if p["src"] != p["dst"]}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_worst_cases(objective: str) -> None:
    giant = zigzag(Documents([1_000_003]), 8, [[5]])
    assert sorted(set(equal_token_layout(giant, 4, objective).token_counts)) == [125000, 125001]
    nothing = zigzag(Documents([0, 0]), 4)
    assert equal_token_layout(nothing, 2, objective) is nothing
    few = zigzag(Documents([3]), 8, [[6]])
    after = equal_token_layout(few, 4, objective).token_counts
    assert after.sum() == 3 and after.max() == 1
    assert after[4:].sum() == 3, "no row need cross"
    equal = equal_tokens(Documents([10, 0, 7]), 4)
    assert equal_token_layout(equal, 4, objective) is equal


def test_extra_tokens_stay_where_they_are() -> None:
    """Counts of q and q + 1 in any places are equal already."""
    counts = np.array([3, 4, 3, 3, 4, 4])
    assert not len(equal_token_flows(counts, 3).flows)


def test_a_giver_is_not_cut_into_pieces() -> None:
    """The tail of a rank's rows leaves: of many documents one is cut."""
    documents = Documents([10] * 8)
    source = zigzag(documents, 2, [[0]] * 7 + [[1]])
    target = equal_token_layout(source, 2)
    assert [(s.doc, s.start, s.stop) for s in target.spans_of(0)] == [(d, 10 * d, 10 * d + 10) for d in range(4)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: equal_token_flows(np.ones(4), 3), "ranks_per_node is 3; valid: a divisor of the 4 ranks"),
        (lambda: equal_token_flows(np.ones(4), 0), "ranks_per_node is 0"),
        (lambda: equal_token_flows(np.ones(4), 2, "max"), "objective is 'max'; valid: sum, minmax"),
        (
            lambda: equal_token_layout(zigzag(Documents([4]), 2).with_heads(np.array([[0, 1], [1, 2]])), 2),
            "attention_layout splits heads",
        ),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        call()
