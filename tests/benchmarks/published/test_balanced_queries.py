"""Chunks of the row, queries that move, bins of documents, rows packed anew: they are what they say, and exact."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks.published.bases import rows_of_equal_work
from benchmarks.published.systems import SYSTEMS
from benchmarks.published.systems.balanced_queries import (
    balanced_queries,
    balanced_tasks,
    chunked_plan,
    dispatched,
    equal_runs,
    in_stages,
    moved_plan,
    piece_pairs,
    shards_of,
)
from benchmarks.published.systems.even import Case
from benchmarks.published.systems.ring_groups import assigned_ranks, packed_bins, ring_seconds, seated
from mindspeed_cp import AttentionConfig, Documents, Topology, verify_plan
from mindspeed_cp.algorithms.kv_fetch.needs import needed_tokens
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.layout import Layout
from tests.benchmarks.published.cases import LENGTHS

ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=16)
NEW = ("WLB-LLM", "MagiAttention", "DHP", "DistCA*")


def random_documents(seed: int, tokens: int) -> Documents:
    """Documents of very different lengths, some empty."""
    random = np.random.default_rng(seed)
    lengths = np.minimum((random.pareto(0.7, 12) * 40).astype(np.int64), tokens // 3)
    return Documents(np.append(lengths, [0, 1, tokens // 2]))


def pairs_of_ranks(layout: Layout) -> np.ndarray:
    """Visible pairs of the queries of each rank."""
    return np.bincount(layout.spans["rank"], piece_pairs(layout.spans, layout.documents, ATTENTION), layout.ranks)


@pytest.mark.parametrize("system", NEW)
@pytest.mark.parametrize("seed", range(3))
def test_random_batches_are_exact(system: str, seed: int) -> None:
    cluster = load_cluster("a2").with_ranks(3)
    attention = AttentionConfig(heads=4, kv_heads=(4, 2, 1)[seed], head_dim=16)
    problem = Case(random_documents(seed, 2400), Topology(2, 3, "a2"), attention, cluster)
    plans = {id(candidate.plan): candidate.plan for candidate in SYSTEMS[system](problem)}
    assert plans
    for plan in plans.values():
        verify_plan(plan)


@pytest.mark.parametrize("nearest_of", [0.0, 0.25])
def test_every_rank_gets_as_many_chunks_and_about_as_much_attention(nearest_of: float) -> None:
    documents = Documents([9000, 300, 4000, 2000, 1084])
    layout = dispatched(documents, 8, ATTENTION, 128, nearest_of)
    layout.check()
    assert set(layout.token_counts.tolist()) == {documents.tokens // 8}
    pairs, even = pairs_of_ranks(layout), pairs_of_ranks(equal_runs(documents, 8))
    assert pairs.max() < 1.1 * pairs.mean() and even.max() > 1.5 * even.mean()


def test_nearest_chunks_bring_fewer_keys() -> None:
    documents = Documents([1900] * 8)
    fetched = [len_rows(dispatched(documents, 8, ATTENTION, 256, nearest_of)) for nearest_of in (0.0, 1.0)]
    assert 0 < fetched[1] < fetched[0]


def len_rows(layout: Layout) -> int:
    """Rows of keys that ranks fetch."""
    return int(in_stages(layout, layout, ATTENTION, 1).rows.sum())


@pytest.mark.parametrize("degree", [1, 3])
def test_a_rank_fetches_what_it_needs_once_in_stages_of_about_equal_size(degree: int) -> None:
    documents = Documents([4096])
    layout = dispatched(documents, 4, ATTENTION, 64)
    fetches = in_stages(layout, layout, ATTENTION, degree)
    needs = needed_tokens(layout, layout, ATTENTION)
    needed = np.bincount(needs.taker, needs.last - needs.first, 4)
    received = np.bincount(fetches.dst, fetches.rows, 4)
    assert received.sum() < needed.sum() and (received <= needed).all() and (fetches.src != fetches.dst).all()
    assert set(fetches.stage.tolist()) == set(range(degree))
    by_stage = np.bincount(fetches.dst * degree + fetches.stage, fetches.rows, 4 * degree).reshape(4, degree)
    assert (np.abs(by_stage - received[:, None] / degree) <= 64).all(), "to one chunk"
    plan = chunked_plan(layout, Topology(1, 4), ATTENTION, degree)
    assert plan.forward.fetch.items["rows"].sum() == fetches.rows.sum() and plan.forward.steps == degree + 1


def test_tokens_stay_in_equal_runs_and_queries_move_to_ranks_with_less_attention() -> None:
    documents = Documents([6000, 100, 100, 1800])
    home = equal_runs(documents, 4)
    home.check()
    assert set(home.token_counts.tolist()) == {2000}
    computed = balanced_queries(home, ATTENTION, 64, 0.05)
    computed.check()
    before, after = pairs_of_ranks(home), pairs_of_ranks(computed)
    assert before.max() > 1.5 * before.mean() and after.max() <= 1.06 * after.mean()
    assert balanced_queries(home, ATTENTION, 64, 10.0).same_as(home), "nothing is above that"
    plan = moved_plan("moved", home, computed, Topology(2, 2), ATTENTION, 2)
    verify_plan(plan)
    assert plan.layout.same_as(home) and plan.linear_layout is None
    assert len(plan.parts) == 2 and any(part.q_redistribution is not None for part in plan.parts)


def test_tasks_are_even_and_short_tiles_count_as_more_work() -> None:
    documents = Documents([4000, *[50] * 80])
    tasks = balanced_tasks(documents, 4, ATTENTION, 0.25, 0.0)
    tasks.check()
    pairs = pairs_of_ranks(tasks)
    assert pairs.max() < 1.1 * pairs.mean()
    borders = tasks.spans["start"][tasks.spans["doc"] == 0]
    assert len(borders) > 4 and (borders % 128 == 0).all()
    weighed = pairs_of_ranks(balanced_tasks(documents, 4, ATTENTION, 0.25, 625.0))
    assert weighed.max() > pairs.max(), "ranks with short documents have fewer pairs"


def test_shards_have_so_many_tokens_at_most() -> None:
    home = equal_runs(Documents(LENGTHS), 4)
    shards = shards_of(home, 500)
    rows = shards["stop"] - shards["start"]
    assert rows.min() > 0 and rows.max() == 500 and rows.sum() == sum(LENGTHS)


def test_documents_go_to_the_fullest_bin_that_has_room() -> None:
    """Of 7, 5, 4, 3 and 1 with room for 4: 7 and 1 on two ranks, 5 and 3 on two, 4 alone."""
    bin_of, needs = packed_bins(np.array([4.0, 7.0, 1.0, 5.0, 3.0]), 4.0)
    assert bin_of.tolist() == [2, 0, 0, 1, 1] and needs.tolist() == [2, 2, 1]


def test_ranks_are_assigned_so_that_the_slowest_bin_is_done_soonest() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        seconds = random.uniform(1, 9, (3, 7))
        needs = random.integers(1, 3, 3)
        assigned = assigned_ranks(seconds, needs)
        assert assigned is not None
        degrees, slowest = assigned
        assert (degrees >= needs).all() and degrees.sum() <= 7
        assert slowest == seconds[np.arange(3), degrees - 1].max()
        choices = product(*(range(least, 8) for least in needs.tolist()))
        best = min(max(seconds[i, d - 1] for i, d in enumerate(choice)) for choice in choices if sum(choice) <= 7)
        assert slowest == best
    assert assigned_ranks(np.ones((3, 4)), np.array([2, 2, 1])) is None


def test_groups_of_any_size_are_inside_nodes_where_they_fit() -> None:
    groups = seated(np.array([3, 11, 5, 2, 3]), 3, 8)
    assert [len(group) for group in groups] == [3, 11, 5, 2, 3]
    assert len({rank for group in groups for rank in group}) == 24
    assert [len({rank // 8 for rank in group}) for group in groups] == [1, 2, 1, 1, 1]


def test_a_ring_of_one_rank_waits_for_nothing_and_one_over_nodes_for_its_nic() -> None:
    lengths, bin_of = np.array([40000, 3000]), np.array([0, 1])
    slow = load_cluster("a800").with_values(nic_bandwidth=1e7)
    attention = AttentionConfig(heads=32, head_dim=128)
    fast, held_up = (
        ring_seconds(lengths, bin_of, 2, 16, attention, cluster) for cluster in (load_cluster("a800"), slow)
    )
    np.testing.assert_array_equal(fast[:, :8], held_up[:, :8])
    assert (held_up[:, 8:] > fast[:, 8:]).all() and (np.diff(fast[0, :8]) < 0).all()


def test_rows_packed_anew_have_the_same_documents_and_more_equal_work() -> None:
    rows = [Documents([8000, 192]), Documents([512] * 16), Documents([4096, 4096])]
    cluster, attention = load_cluster("a800"), AttentionConfig(heads=32, head_dim=128)
    packed = rows_of_equal_work(rows, attention, cluster)
    lengths = [sorted(length for row in some_rows for length in row.lengths.tolist()) for some_rows in (rows, packed)]
    assert lengths[0] == lengths[1] and len(packed) == 3
    work = [[float((row.lengths.astype(float) ** 2).sum()) for row in some_rows] for some_rows in (rows, packed)]
    assert max(work[1]) <= max(work[0])
