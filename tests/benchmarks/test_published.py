"""The benchmark against published systems: their plans are exact and what their papers say, times are the simulator's."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published import bases
from benchmarks.published.__main__ import main
from benchmarks.published.bases import Bench, Place, bound, pool_of
from benchmarks.published.rings import Group, RoutedLinkQueues, grouped_rings, routing_pays
from benchmarks.published.systems import (
    BASE,
    OURS,
    SYSTEMS,
    dynamic_cp,
    magi_attention,
    ours,
    ring,
    ulysses,
    usp,
    zeppelin,
)
from benchmarks.published.systems.balanced_queries import (
    balanced_queries,
    dispatched,
    equal_runs,
    moved_plan,
    piece_pairs,
)
from benchmarks.published.systems.even import LOOKED_AT, Case
from benchmarks.published.systems.head_groups import differencing, flexible_groups, group_seconds, least_seconds
from benchmarks.published.systems.ring_groups import (
    Thresholds,
    assigned_ranks,
    packed_bins,
    power_of_two,
    power_of_two_groups,
    zoned_groups,
)
from benchmarks.published.table import Row, line, summary
from benchmarks.published.timing import Candidate, fastest, layer
from mindspeed_cp import AttentionConfig, Documents, Topology, verify_plan
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.simulate.link_queues import LinkQueues
from mindspeed_cp.simulate.simulator import simulate_plan

LENGTHS = [3000, 170, 900, 1, 0, 440, 5120, 333, 64, 2000]


def case(nodes: int = 2, per_node: int = 4, cluster: str = "a800", heads: int = 8, kv_heads: int = 2) -> Case:
    """Documents of very different lengths on a few ranks."""
    attention = AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=16)
    topology = Topology(nodes, per_node, cluster)
    return Case(Documents(LENGTHS), topology, attention, load_cluster(cluster).with_ranks(per_node))


ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=16)


GROUPS: list[Group] = [tuple(range(8)), (0,), (2, 3), (5,), (1,), (4, 5, 6, 7), (0, 1, 2, 3), (1, 2), (0,), (7,)]


ROWS = [Documents([3000, 900, 196]), Documents([4096]), Documents([2000, 2000, 96]), Documents([4000, 96])]
PLACE = Place("a800", "gqa8", 16)
NEAR = 1e-9  # a tolerance for sums in another order


def random_documents(seed: int, tokens: int) -> Documents:
    """Documents of very different lengths, some empty."""
    random = np.random.default_rng(seed)
    lengths = np.minimum((random.pareto(0.7, 12) * 40).astype(np.int64), tokens // 3)
    return Documents(np.append(lengths, [0, 1, tokens // 2]))


def pairs_of_ranks(layout: Layout) -> np.ndarray:
    """Visible pairs of the queries of each rank."""
    return np.bincount(layout.spans["rank"], piece_pairs(layout.spans, layout.documents, ATTENTION), layout.ranks)


# plans


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_way_of_every_system_is_exact(system: str) -> None:
    attention = AttentionConfig(heads=4, kv_heads=1, head_dim=16)
    random = Case(random_documents(2, 2400), Topology(2, 3, "a2"), attention, load_cluster("a2").with_ranks(3))
    seen: dict[int, Plan] = {}
    for problem in (case(2, 4, "a800"), case(1, 4, "a2"), random):
        candidates = SYSTEMS[system](problem)
        assert candidates or problem is random, "8 heads are enough for 8 ranks"
        seen |= {id(candidate.plan): candidate.plan for candidate in candidates}
    for plan in seen.values():
        verify_plan(plan)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rings_of_groups_that_share_ranks_are_exact(interleaved: bool) -> None:
    plan = grouped_rings("rings", Documents(LENGTHS), Topology(2, 4), ATTENTION, GROUPS, interleaved)
    verify_plan(plan)
    for doc, group in enumerate(GROUPS):
        held = plan.layout.spans["rank"][plan.layout.spans["doc"] == doc]
        assert set(held.tolist()) <= set(group)


def test_a_document_gets_the_least_power_of_two_of_ranks_that_has_room() -> None:
    assert [power_of_two(length, 8, 100) for length in (0, 100, 101, 200, 201, 400, 801, 10**6)] == [1, 1, 2, 2, 4, 4, 8, 8]  # fmt: skip
    assert power_of_two(10**6, 12, 100) == 8, "the largest power of two of twelve ranks"


def test_groups_of_powers_of_two_are_aligned_and_balanced_by_squares() -> None:
    lengths = np.array([800, 390, 390, 100, 100, 100, 100, 10, 10])
    groups = power_of_two_groups(lengths, 8, 100)
    assert groups[0] == tuple(range(8))
    assert {groups[1], groups[2]} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    load = np.zeros(8)
    for length, group in zip(lengths.tolist(), groups, strict=True):
        assert group[0] % len(group) == 0 and group == tuple(range(group[0], group[0] + len(group)))
        load[list(group)] += length**2 / len(group)
    assert load.max() - load.min() <= 100**2, "no more than one document of one rank"


def test_zones_cut_the_longest_over_nodes_the_next_in_a_node_and_leave_the_others_whole() -> None:
    work = np.array([20.0, 4.0, *[1.0] * 16])  # 40 in all: 10 a node, 2.5 a rank
    groups = zoned_groups(work, work, 4, 4, Thresholds(1.0, 1.0))
    assert len(groups[0]) == 8 and len({rank // 4 for rank in groups[0]}) == 2, "the fewest nodes, all their ranks"
    assert len(groups[1]) == 2 and len({rank // 4 for rank in groups[1]}) == 1, "the fewest ranks of one node"
    assert all(len(group) == 1 for group in groups[2:])
    assert not {rank // 4 for rank in groups[1]} & {rank // 4 for rank in groups[0]}, "to the nodes with less"
    finer = zoned_groups(work, work, 4, 4, Thresholds(0.5, 0.5))
    assert len(finer[0]) == 16 and len(finer[1]) == 4


def test_differencing_divides_as_karmarkar_and_karp_do() -> None:
    """8 and 7 differ by 1, 6 and 5 by 1, these by 0; 4 is left: 8 + 6 and 7 + 5 + 4 (their example)."""
    part = differencing(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2)
    sums = np.bincount(part, [8.0, 7.0, 6.0, 5.0, 4.0], 2)
    assert sorted(sums.tolist()) == [14.0, 16.0]
    assert np.bincount(differencing(np.ones(12), 4)).tolist() == [3] * 4


def test_flexible_groups_are_as_soon_done_as_can_be() -> None:
    """Two ranks for the longest document, one for each of the others; sharing costs a tenth."""
    work = np.array([7.0, 4.0, 4.0])
    groups = flexible_groups({1: work, 2: 1.1 * work / 2, 4: 1.1 * work / 4}, 4, np.ones(3, np.int64))
    assert groups is not None
    assert groups[0].tolist() == [2, 1, 1] and groups[1].tolist() == [0, 2, 3]


@pytest.mark.parametrize(("name", "links"), [("a2", 1), ("a800", 1), ("a2", 7), ("a800", 7)])
def test_members_of_a_group_have_the_links_of_the_group(name: str, links: int) -> None:
    """On a mesh a group of 2 has one link of the 7, which it can fill with half of its rows; on a switch all of it."""
    cluster, documents = load_cluster(name), Documents([4096])
    size = links + 1
    attention = AttentionConfig(32, 32, 128)
    alone, group = (group_seconds(documents, Topology(1, 8, name), attention, cluster, n)[0] for n in (1, size))
    rate = {"a2": links * 28e9, "a800": 200e9}[name] * cluster.communication_efficiency
    sent = 2 * 2 * 4 * 32 * 128 * 4096 / size * links / size  # there and back: q, k, v, out
    assert group - alone / size == pytest.approx(sent / rate)


@pytest.mark.parametrize("seed", range(12))
def test_flexible_groups_are_nearly_the_best_of_all(seed: int) -> None:
    """Of 4 ranks in every division into groups, with 5 documents in every way: within 2 %, and never too full."""
    random = np.random.default_rng(seed)
    tokens = np.exp(random.normal(0, 1, 5))
    seconds = {size: (tokens**2 + tokens) / size + (size > 1) * (0.1 + 0.05 * size) * tokens for size in (1, 2, 4)}
    for room in (np.inf, 1.4 * tokens.sum() / 4):
        best = np.inf
        for sizes in ((4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)):
            for group in product(range(len(sizes)), repeat=5):
                load, held = np.zeros((2, len(sizes)))
                for doc, number in enumerate(group):
                    load[number] += seconds[sizes[number]][doc]
                    held[number] += tokens[doc] / sizes[number]
                if held.max() <= room:
                    best = min(best, load.max())
        groups = flexible_groups(seconds, 4, tokens, room)
        assert groups is not None
        degree, first = groups
        held, load = np.zeros((2, 4))
        for doc in range(5):
            load[first[doc]] += seconds[degree[doc]][doc]
            held[first[doc]] += tokens[doc] / degree[doc]
        assert best <= load.max() * (1 + 1e-9) and load.max() <= 1.02 * best and held.max() <= room * (1 + 1e-9)
        assert least_seconds(seconds, 4) <= best * (1 + 1e-9)


def test_groups_that_have_no_room_are_none() -> None:
    assert flexible_groups({1: np.ones(1)}, 2, np.array([8]), 7) is None


@pytest.mark.parametrize("nearest_of", [0.0, 0.25])
def test_every_rank_gets_as_many_chunks_and_about_as_much_attention(nearest_of: float) -> None:
    documents = Documents([9000, 300, 4000, 2000, 1084])
    layout = dispatched(documents, 8, ATTENTION, 128, nearest_of)
    layout.check()
    assert set(layout.token_counts.tolist()) == {documents.tokens // 8}
    pairs, even = pairs_of_ranks(layout), pairs_of_ranks(equal_runs(documents, 8))
    assert pairs.max() < 1.1 * pairs.mean() and even.max() > 1.5 * even.mean()


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


# times


@pytest.mark.parametrize("system", [ring, ulysses, usp, dynamic_cp, magi_attention, ours])
@pytest.mark.parametrize("cluster", ["a800", "a2"])
def test_a_layer_takes_what_the_simulator_says(system, cluster: str) -> None:  # type: ignore[no-untyped-def]
    problem = case(cluster=cluster)
    for candidate in system(problem):
        actual, expected = layer(candidate, problem.cluster), simulate_plan(candidate.plan, problem.cluster)
        assert actual.total == pytest.approx(expected.total, rel=NEAR), candidate.label
        np.testing.assert_allclose(actual.busy, expected.compute + expected.linear, rtol=NEAR)
        np.testing.assert_allclose(actual.exposed, expected.exposed, rtol=1e-6, atol=1e-12)
        assert actual.imbalance == pytest.approx(expected.imbalance, rel=1e-6, abs=NEAR)


def test_evenly_spaced_ranks_stand_for_all_of_an_even_ring() -> None:
    problem = case(nodes=5, per_node=8)
    assert problem.topology.ranks > LOOKED_AT
    (candidate,) = ring(problem)
    assert candidate.representative is not None and len(np.unique(candidate.representative)) == LOOKED_AT
    exact = layer(Candidate("all", candidate.plan), problem.cluster).total
    assert layer(candidate, problem.cluster).total == pytest.approx(exact, rel=0.02)


def test_no_way_that_is_left_out_is_faster() -> None:
    problem = case()
    for candidates in (zeppelin(problem), dynamic_cp(problem)):
        every = [layer(candidate, problem.cluster).total for candidate in candidates]
        assert fastest(candidates, problem.cluster)[1].total == min(every)
        for candidate, seconds in zip(candidates, every, strict=True):
            assert candidate.least(problem.cluster) <= seconds


@pytest.mark.parametrize("name, pays", [("a800", True), ("h200", True), ("a2", True), ("a3", False)])
def test_routing_pays_where_a_nic_is_slower_than_links_in_the_node(name: str, pays: bool) -> None:
    cluster = load_cluster(name)
    assert routing_pays(cluster) is pays
    src, dst, size, now = np.array([0]), np.array([cluster.ranks_per_node]), np.array([1e8]), np.zeros(1)
    routed, plain = (kind(cluster, 2).serve(src, dst, size, now)[1][0] for kind in (RoutedLinkQueues, LinkQueues))
    assert (routed < plain) is np.bool_(pays) or not pays


# batches and tables


def test_rows_run_beside_each_other_and_the_slowest_counts() -> None:
    timed = Bench().time("even ring", ROWS, PLACE)
    assert timed is not None and not timed.pooled and len(timed.chosen) == 4
    each = [
        layer(candidate, PLACE.case(row, 4).cluster).total for candidate, row in zip(timed.chosen, ROWS, strict=True)
    ]
    assert timed.seconds == max(each) and timed.slowest.total == max(each)
    assert {candidate.plan.ranks for candidate in timed.chosen} == {4}


@pytest.mark.parametrize("system", [system for system in bases.EITHER if system not in bases.REPACKED])
def test_systems_that_can_do_both_count_by_the_better(system: str) -> None:
    bench = Bench()
    timed = bench.time(system, ROWS, PLACE)
    pool = bench.time(system, [pool_of(ROWS)], PLACE)
    assert timed is not None and pool is not None
    rows = [bench.time(system, [row], Place("a800", "gqa8", 4)) for row in ROWS]
    assert timed.seconds == min(pool.seconds, max(row.seconds for row in rows if row is not None))


def test_nothing_is_faster_than_the_bound() -> None:
    least = bound(ROWS, PLACE)
    for system in ("even ring", "Ulysses", "USP", "Zeppelin", "ours"):
        timed = Bench().time(system, ROWS, PLACE)
        assert timed is not None and timed.seconds > least


def test_a_bound_of_tokens_leaves_out_plans_that_are_too_full() -> None:
    rows, place = [Documents([9000, *[900] * 12])], Place("a800", "mha", 4)
    most = 1.05 * rows[0].tokens / 4
    for system in ("FlexSP", "verl", "ours"):
        free, bounded = (Bench().time(system, rows, replace(place, tokens_over_mean=x)) for x in (None, 1.05))
        assert free is not None and bounded is not None
        assert bounded.fullest <= most + 1
        assert (free.fullest > most and free.seconds < bounded.seconds) or system == "ours"
    one_long = [Documents([9000, 30])]
    assert Bench().time("dynamic CP", one_long, place) is not None
    assert Bench().time("dynamic CP", one_long, replace(place, tokens_over_mean=1.0)) is None


def test_gradients_of_other_systems_travel_in_bf16_and_ours_in_fp32() -> None:
    for system, faster in (("even ring", True), ("ours", False)):
        fp32, bf16 = (Bench().time(system, ROWS[:1], replace(PLACE, reduce_dtype=x)) for x in ("float32", "bfloat16"))
        assert fp32 is not None and bf16 is not None and (bf16.seconds < fp32.seconds) is faster


def row(cluster: str, heads: str, ring: list[float], usp: list[float], ours: list[float]) -> Row:
    """A row of two batches; Ulysses cannot run it."""
    seconds: dict[str, list[float | None]] = {BASE: [*ring], "USP": [*usp], "Ulysses": [None, None], OURS: [*ours]}
    return Row(cluster, heads, "one", 64, seconds, [0.9, 1.8])


def test_speeds_are_ratios_batch_by_batch_and_every_cluster_counts_alike() -> None:
    first = row("a800", "mha", [8.0, 8.0], [3.0, 2.0], [1.0, 2.0])
    speed = first.speed(OURS)
    assert speed is not None and speed.tolist() == [8.0, 4.0]
    assert first.speed("Ulysses") is None and first.speed("no such system") is None
    assert first.against().tolist() == [3.0, 1.0], "of other systems the fastest of each batch"
    np.testing.assert_allclose(first.fraction, [0.9, 0.9])
    said = summary("mha", [first, first, row("a2", "mha", [2.0, 6.0], [2.0, 4.0], [1.0, 2.0])])
    assert "ours over the even ring 4.25x (a800 6.00, a2 2.50)" in said
    assert "each batch 2.00x (least row 2.00, least batch 1.00)" in said and "p5 0.900" in said


def test_the_command_prints_a_table_and_writes_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    words = "--clusters a2 --heads gqa8 --ranks 8 --lengths prolong --batches 1 --basis 1 --further --json"
    main([*words.split(), str(file)])
    printed = capsys.readouterr().out
    (figures,), (bounded,) = json.loads(file.read_text()).values()
    assert max(share for shares in bounded["fullest"].values() for share in shares) <= 1.5 + 1e-3
    again = Row(**figures)
    assert line(again, list(SYSTEMS)) in printed
    assert set(figures["seconds"]) == set(SYSTEMS) and all(len(times) == 1 for times in figures["seconds"].values())
    speed = again.speed(OURS)
    assert speed is not None and speed[0] > 1
    assert ("ours is not first in 0 of 1 batches" in printed) == (again.against()[0] >= 1) == (not again.why)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--clusters a9", "cluster 'a9': no such preset"),
        ("--lengths novels", "lengths 'novels': no such distribution"),
        ("--ranks 20", "ranks is 20; valid for cluster a800"),
        ("--batches 0", "--batches: 0; valid: a whole number from 1"),
        ("--further novels", "--further: invalid choice: 'novels'"),
        ("--json none/x.json", "--json: none/x.json: there is no folder"),
    ],
)
def test_bad_options_are_told_in_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
