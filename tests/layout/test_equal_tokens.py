"""The layout of linear layers: equal token counts by the fewest rows across nodes, compared with linear programs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.layout import Layout, Redistribution, contiguous, zigzag
from mindspeed_cp.layout.equal_tokens import equal_token_flows, equal_token_layout
from tests.layout.layouts import equal_tokens

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


def fewest_across(counts: np.ndarray, per: int) -> float:
    """The least number of rows across nodes of any move to equal counts, whichever ranks get one token more."""
    leaves, arrives, crosses = transport(counts, per)
    share, extra = divmod(int(counts.sum()), len(counts))
    return solved(
        crosses.astype(float),
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
    solution = linprog(cost, **constraints, method="highs")
    assert solution.status == 0, solution.message
    return float(solution.fun)


def across(flows: np.ndarray, per: int) -> np.ndarray:
    """The flows between nodes."""
    return flows[flows["src"] // per != flows["dst"] // per]


def after(counts: np.ndarray, flows: np.ndarray) -> np.ndarray:
    """Rows of each rank after the flows."""
    counts = np.array(counts, np.int64)
    np.subtract.at(counts, flows["src"], flows["rows"])
    np.add.at(counts, flows["dst"], flows["rows"])
    return counts


def peak_of(flows: np.ndarray, per: int) -> int:
    """The largest number of rows that one rank sends, or receives, across nodes."""
    crossing = across(flows, per)
    return int(max(np.bincount(crossing[side], crossing["rows"]).max(initial=0) for side in ("src", "dst")))


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
def test_no_linear_program_moves_fewer_rows_across_or_has_a_smaller_peak(nodes: int, per: int, seed: int) -> None:
    counts = counts_of(seed, nodes * per)
    flows = equal_token_flows(counts, per)
    targets, peak, crossing = after(counts, flows), peak_of(flows, per), across(flows, per)["rows"].sum()
    assert crossing == pytest.approx(fewest_across(counts, per), abs=1e-6)
    assert peak == np.ceil(smallest_peak(counts, targets, per) - 1e-6)
    cost = flows["rows"].sum() + (PRICE - 1) * crossing
    assert cost == pytest.approx(cheapest_under(peak, counts, targets, per), abs=1e-6)


def test_all_ranks_of_a_node_send_across() -> None:
    """One rank has all the surplus: the others send rows of their own across, and get as many from it."""
    flows = equal_token_flows(np.array([18, 4, 4, 2, 8, 3, 1, 0]), 4)
    assert peak_of(flows, 4) == 2 and flows["rows"].sum() == 24


counts_strategy = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(counts_strategy, st.data())
def test_rows_are_conserved_and_equal_up_to_one(counts: list[int], data: st.DataObject) -> None:
    per = data.draw(st.sampled_from([n for n in range(1, len(counts) + 1) if len(counts) % n == 0]))
    flows = equal_token_flows(np.array(counts), per)
    targets = after(np.array(counts), flows)
    assert targets.max() - targets.min() <= 1 and targets.sum() == sum(counts)
    assert (flows["rows"] > 0).all()
    inside = flows[flows["src"] // per == flows["dst"] // per]
    assert not set(inside["src"]) & set(inside["dst"])  # no rank gives and takes in its own node
    pairs = list(zip(flows["src"], flows["dst"], strict=True))
    assert pairs == sorted(set(pairs))
    assert np.array_equal(flows, equal_token_flows(np.array(counts), per))
    if max(counts) - min(counts) <= 1:
        assert not len(flows)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=8), st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (2, 5)]), st.randoms()
)  # fmt: skip
def test_a_layout_keeps_its_laws_and_its_rows(lengths, nodes, random) -> None:  # type: ignore[no-untyped-def]
    documents, ranks = Documents(lengths), nodes[0] * nodes[1]
    groups = [random.sample(range(ranks), random.randint(1, ranks)) for _ in lengths]
    source = random.choice((zigzag, contiguous))(documents, ranks, groups)
    target = equal_token_layout(source, nodes[1])
    target.check()
    counts = target.token_counts
    assert counts.max() - counts.min() <= 1
    flows = equal_token_flows(source.token_counts, nodes[1])
    assert moved_rows(source, target) == {(f["src"], f["dst"]): f["rows"] for f in flows}
    assert equal_token_layout(source, nodes[1]).same_as(target)
    assert equal_token_layout(target, nodes[1]) is target
    x = np.arange(documents.tokens)
    assert np.array_equal(target.unshard([target.shard(x, rank) for rank in range(ranks)]), x)


def moved_rows(source: Layout, target: Layout) -> dict[tuple[int, int], int]:
    """Rows that go from one rank to another, as the redistribution has them."""
    move = Redistribution.between(source, target, 1)
    if move is None:
        return {}
    return {(p["src"], p["dst"]): p["rows"] for p in move.rank_pairs if p["src"] != p["dst"]}


def test_equal_tokens_of_one_full_rank_and_of_empty_ranks() -> None:
    giant = zigzag(Documents([1_000_003]), 8, [[5]])
    assert sorted(set(equal_token_layout(giant, 4).token_counts)) == [125000, 125001]
    nothing = zigzag(Documents([0, 0]), 4)
    assert equal_token_layout(nothing, 2) is nothing
    few = zigzag(Documents([3]), 8, [[6]])
    counts = equal_token_layout(few, 4).token_counts
    assert counts.sum() == 3 and counts.max() == 1
    assert counts[4:].sum() == 3, "no row need cross"
    equal = equal_tokens(Documents([10, 0, 7]), 4)
    assert equal_token_layout(equal, 4) is equal


def test_a_giver_is_not_cut_into_pieces() -> None:
    """The tail of a rank's rows leaves: of many documents one is cut."""
    documents = Documents([10] * 8)
    source = zigzag(documents, 2, [[0]] * 7 + [[1]])
    target = equal_token_layout(source, 2)
    assert [(doc, start, stop) for _, doc, start, stop in target.rank_spans(0).tolist()] == [
        (d, 10 * d, 10 * d + 10) for d in range(4)
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: equal_token_flows(np.ones(4), 3), "ranks_per_node is 3; valid: a divisor of the 4 ranks"),
        (lambda: equal_token_flows(np.ones(4), 0), "ranks_per_node is 0"),
        (
            lambda: equal_token_layout(zigzag(Documents([4]), 2).with_heads(np.array([[0, 1], [1, 2]])), 2),
            "attention_layout splits heads",
        ),
    ],
)
def test_the_error_of_bad_counts_has_the_argument(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        call()
