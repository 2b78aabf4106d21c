"""Parts of a placement: whole nodes, flexible groups, parts of split heads, and documents placed anew by waits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement, plan_from_placement
from mindspeed_cp.algorithms.placement.estimate import PlacementModel
from mindspeed_cp.algorithms.placement.loads import UNBOUNDED, DocumentCosts, NodeLoads, NodeRoom, RankLoads
from mindspeed_cp.algorithms.placement.placer import LATEST, DocumentPlacer, flexible_groups, karmarkar_karp
from mindspeed_cp.algorithms.placement.policy import (
    DocumentShares,
    Placement,
    PlacementPolicy,
    split_parts,
)
from mindspeed_cp.algorithms.placement.search import PlacementSearch, _Trial
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.cluster.calibration import preset_values
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.simulate.simulator import simulate_plan

MHA = AttentionConfig(heads=32, head_dim=128)
NEVER = float("inf")
works = st.lists(st.integers(1, 1000), min_size=1, max_size=30)


def model_of(documents: Documents, topology: Topology, attention: AttentionConfig = MHA) -> PlacementModel:
    layer = LayerCost.for_attention(attention)
    return PlacementModel(documents, documents, topology, attention, cluster_of(topology), layer, True)


def costs_of(work: list[float]) -> DocumentCosts:
    return DocumentCosts(work, work, [0.0] * len(work), [int(10 * cost) for cost in work])


def test_after_the_fastest_placement_come_those_of_other_kinds_that_are_nearly_as_fast() -> None:
    members = DocumentShares.from_lists([])
    policies = {
        "fastest": (PlacementPolicy(0.5, 0.1), 1.0, 1.3),
        "alike": (PlacementPolicy(0.5, 0.2), 1.01, 1.3),
        "equal tokens": (PlacementPolicy(0.5, 0.1, remap=True), 1.02, 1.0),
        "inside nodes": (PlacementPolicy(0.5, 0.1, wide=False), 1.03, 1.3),
        "as fast": (PlacementPolicy(1.0, NEVER, power=True), 1.03, 1.3),
        "layout of its own": (PlacementPolicy(0.5, 0.1, remap=True, wide=False), 1.04, 1.3),
        "slow": (PlacementPolicy(1.0, NEVER, flexible=True), 1.06, 1.3),
    }
    tried = []
    for policy, seconds, most in policies.values():
        score = SimpleNamespace(tokens=np.array([2 - most, most]), delay=np.array([seconds]))
        tried.append(_Trial(Placement(policy, members, {}), score, seconds))  # type: ignore[arg-type]
    result = PlacementSearch.__new__(PlacementSearch)  # without a search
    result.tried = tried
    names = {trial.placement: name for trial, name in zip(tried, policies, strict=True)}
    order = [names[placement] for placement in result.best_of_policies(9)]
    assert order == ["fastest", "inside nodes", "layout of its own", "alike", "equal tokens", "slow"]
    assert [names[placement] for placement in result.best_of_policies(1)] == ["fastest"]


def test_documents_of_a_rank_are_tried_whole_with_a_layout_for_linear_layers() -> None:
    """15 equal documents on 8 ranks: the model's fastest first placement with such a layout splits all heads."""
    topology, attention = Topology(1, 8, "h200"), AttentionConfig(heads=32, kv_heads=8, head_dim=128)
    result = PlacementSearch(model_of(Documents([5460] * 15), topology, attention))
    policy = result.ranked[0].policy
    assert policy.remap and not result.ranked[0].split and result.score.total < 1.02 * result.bound


@settings(max_examples=50, deadline=None)
@given(works, st.sampled_from([1, 2]), st.booleans())
def test_sums_of_nodes_are_those_of_what_was_placed_and_caps_are_kept(work, width, capped):  # type: ignore[no-untyped-def]
    ranks_per_node, nodes = 3, 4
    work = sorted(map(float, work), reverse=True)
    cap = 10 * sum(work) / 12 * 1.3 if capped else UNBOUNDED
    loads = RankLoads(costs_of(work), nodes * ranks_per_node, cap)
    placed = NodeLoads(loads, ranks_per_node, sum(work) / 12)
    entries = [placed.place(doc, width, work[doc]) for doc in range(len(work))]
    expected = np.zeros(nodes)
    for doc, groups, shares in entries:
        assert sum(shares) == pytest.approx(1)
        for group, share in zip(groups, shares, strict=True):
            expected[group * width : (group + 1) * width] += share * work[doc] / width
    assert placed.seconds == pytest.approx(expected)
    placed.add_to(loads)
    assert loads.seconds == pytest.approx(np.repeat(expected / ranks_per_node, ranks_per_node))
    assert max(loads.tokens) <= cap * (1 + 1e-9)


def test_a_document_goes_to_the_emptiest_node_until_none_has_room() -> None:
    loads = RankLoads(costs_of([4.0, 3.0, 3.0]), 2, UNBOUNDED)
    placed = NodeLoads(loads, 1, 5.0)
    assert [placed.place(doc, 1, work) for doc, work in enumerate([4.0, 3.0])] == [(0, [0], [1.0]), (1, [1], [1.0])]
    _, nodes, shares = placed.place(2, 1, 3.0)
    assert nodes == [0, 1] and shares == pytest.approx([1 / 3, 2 / 3])


def test_short_documents_are_not_cut_over_nodes_that_they_would_fill() -> None:
    placed = NodeLoads(RankLoads(costs_of([4.0, 4.0, 4.0]), 2, UNBOUNDED), 1, 6.0, min_cross_node_length=1000)
    assert [placed.place(doc, 1, 4.0)[1] for doc in range(3)] == [[0], [1], [0]]


def test_of_equally_loaded_ranks_those_of_all_nodes_get_documents_in_turn() -> None:
    """22 equal documents on 4 nodes of 4: the second documents of 6 ranks are not all on the first two nodes."""
    placer = DocumentPlacer(model_of(Documents([5000] * 22), Topology(4, 4, "h200")))
    owners = placer.place(PlacementPolicy(cut=2.0, split=NEVER, power=True)).whole.rank
    assert sorted(np.bincount(owners // 4, minlength=4)) == [5, 5, 6, 6]
    assert np.bincount(owners, minlength=16).max() == 2


@settings(max_examples=50, deadline=None)
@given(works)
def test_room_of_nodes_is_kept(work):  # type: ignore[no-untyped-def]
    loads = RankLoads(costs_of(list(map(float, work))), 6, UNBOUNDED)
    room = NodeRoom(loads, 2, 500.0)
    for doc in range(len(work)):
        ranks = sorted({room.emptiest_rank, doc % 6})
        loads.add(doc, ranks, [1 / len(ranks)] * len(ranks))
        room.update(ranks)
        seconds = np.array(loads.seconds).reshape(3, 2)
        assert room.free == pytest.approx(np.maximum(500 - seconds, 0).sum(1))
        assert room.lowest == pytest.approx(seconds.min(1))
        assert loads.seconds[room.emptiest_rank] == seconds.min()


@settings(max_examples=60, deadline=None)
@given(works, st.sampled_from([4, 8, 12]))
def test_flexible_groups_lie_apart_and_are_done_in_time(work, ranks):  # type: ignore[no-untyped-def]
    work = sorted(map(float, work), reverse=True)
    seconds = {size: [cost / size + 1 for cost in work] for size in (1, 2, 4)}
    fair = sum(work) / ranks
    groups = flexible_groups(seconds, range(len(work)), ranks, fair)
    if groups is None:
        return
    loads: dict[tuple[int, int], float] = {}
    for doc, (size, first) in enumerate(zip(*groups, strict=True)):
        loads[first, size] = loads.get((first, size), 0.0) + seconds[size][doc]
    spans = sorted(loads)
    assert all(first % size == 0 and first + size <= ranks for first, size in spans)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert max(loads.values()) <= LATEST * fair * (1 + 1e-9)


def test_the_longest_document_gets_the_larger_group() -> None:
    seconds = {size: [work / size for work in (8.0, 4.0, 4.0)] for size in (1, 2, 4)}
    assert flexible_groups(seconds, range(3), 4, 4.0) == ([2, 1, 1], [0, 2, 3])


def test_parts_have_each_document_once_and_those_over_several_nodes_are_between() -> None:
    inside = DocumentShares.from_lists([(doc, [doc % 2], [1.0]) for doc in range(9)])
    small = DocumentShares.from_lists([(9, [1], [1.0])])
    crossing = DocumentShares.from_lists([(10, [0, 1], [0.5, 0.5]), (11, [1], [1.0])])
    wide = DocumentShares.from_lists([(12, [0], [1.0])])
    sizes = {2: small, 4: DocumentShares.from_lists([*inside.on_several(0), *crossing.on_several(0)]), 8: wide}
    placement = Placement(PlacementPolicy(1.0, 0.0), DocumentShares.from_lists([]), sizes, parts=3)
    work = np.linspace(2.0, 1.0, 13)
    parts = split_parts(placement, work, 4)
    docs = [sorted(set(members.doc.tolist())) for _, members in parts]
    assert sorted(doc for part in docs for doc in part) == list(range(13))
    assert [size for size, _ in parts] == [2, 4, 4, 8, 4, 4]
    assert docs[2] == [10] and docs[3] == [12]
    first, *_, second, third = (
        np.array([work[part][np.array(part) % 2 == i].sum() for i in (0, 1)]) for part in docs[1:]
    )
    assert (second > 1.2 * np.maximum(first, third)).all(), "the first and the last one have less work"


def test_documents_are_placed_anew_by_waits_and_those_over_several_nodes_stay() -> None:
    documents = Documents([30000, *[3000] * 40])
    topology = Topology(4, 4, "a800")
    model = model_of(documents, topology)
    placer, policy = DocumentPlacer(model), PlacementPolicy(0.5, 0.0)
    before = placer.place(policy)
    kept = before.on_several_nodes(4)
    assert kept[1]
    delay = np.zeros(16)
    delay[:4] = 0.3 * model.bound
    after = placer.place(policy, before, delay)
    assert after.on_several_nodes(4)[1].keys() >= kept[1].keys()
    for size, entries in kept[1].items():
        assert all(entry in after.on_several_nodes(4)[1][size] for entry in entries)
    busy = [model.score(placement).busy for placement in (before, after)]
    assert busy[1][:4].max() < busy[0][:4].max()
    finish = busy[1] + delay
    assert finish.max() < 1.1 * finish.mean()
    assert np.unique(np.concatenate([after.whole.doc, after.split_documents])).tolist() == list(range(41))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=25), st.sampled_from([(2, 4), (1, 8), (4, 2), (2, 3)]),
       st.sampled_from([8, 3]), st.integers(1, 3))  # fmt: skip
def test_plans_of_all_kinds_of_groups_are_proved(lengths, shape, heads, parts):  # type: ignore[no-untyped-def]
    documents, topology, attention = Documents(lengths), Topology(*shape), AttentionConfig(heads=heads, head_dim=64)
    placer = DocumentPlacer(model_of(documents, topology, attention))
    flexible = placer.place_flexible(PlacementPolicy(0.0, NEVER, flexible=True))
    equal = [placer.place_equal(PlacementPolicy(0, 0, equal=size)) for size in placer.equal_sizes]
    placements = [placer.place(PlacementPolicy(0.5, 0.0)), placer.place(PlacementPolicy(0.5, 0.0, wide=False))]
    for placement in [*placements, *(each for each in (flexible, *equal) if each is not None)]:
        placement = Placement(placement.policy, placement.whole, placement.split, parts, parts)
        verify_plan(plan_from_placement(placement, documents, documents, topology, attention))


@pytest.mark.parametrize("lengths", [[21845] * 3, [4096] * 16, [60000, *[1000] * 5]])
def test_default_plans_are_as_fast_as_ulysses_and_ring(lengths: list[int]) -> None:
    documents, topology = Documents(lengths), Topology(2, 8, "a800")
    ours = simulate_plan(build_plan(documents, topology, MHA, "hierarchical"), cluster_of(topology)).total
    for degree in (4, 8, 16):
        if degree == topology.ranks:
            plan = build_plan(documents, topology, MHA, "ulysses")
        else:
            plan = build_plan(documents, topology, MHA, "hybrid", ulysses_degree=degree)
        assert ours <= 1.01 * simulate_plan(plan, cluster_of(topology)).total


def test_redistributions_of_several_parts_hide_each_other() -> None:
    documents, topology = Documents(sample_batch("prolong", 16 * 4096, 0)), Topology(2, 8, "a2")
    placement = DocumentPlacer(model_of(documents, topology)).place(PlacementPolicy(0.5, 0.0))
    seconds = []
    for parts in (1, 3):
        placement = Placement(placement.policy, placement.whole, placement.split, parts)
        plan = plan_from_placement(placement, documents, documents, topology, MHA)
        seconds.append(simulate_plan(plan, cluster_of(topology)).total)
    assert seconds[1] < 0.98 * seconds[0]


def test_placements_of_thousands_of_ranks_are_few() -> None:
    documents, topology = Documents([1000] * 9000), Topology(512, 8, "a800")
    result = choose_placement(documents, documents, topology, MHA)
    assert 1 <= len(result.ranked) <= 12


def test_all_documents_go_to_groups_of_any_number_of_nodes_that_heads_allow() -> None:
    """Four nodes of two ranks and eight heads: groups of four nodes, of two and of one."""
    documents, topology = Documents([5000, 40, 700]), Topology(4, 2, "a2")
    model = model_of(documents, topology, AttentionConfig(heads=8, head_dim=64))
    placer, placements = DocumentPlacer(model), {}
    for nodes in (1, 2, 4):
        placement = placer.place(PlacementPolicy(0, 0, everywhere=True, group_nodes=nodes))
        ((size, members),) = placement.split.items()
        assert size == 2 * nodes and len(members.doc) == 3 * 4 // nodes
        assert members.share == pytest.approx(nodes / 4)
        placements[nodes] = placement
    default = placer.place(PlacementPolicy(0, 0, everywhere=True))
    assert default.split.keys() == placements[4].split.keys()
    tried = {trial.placement.policy.group_nodes for trial in PlacementSearch(model).tried}
    assert tried == {0, 2}


def test_clusters_whose_launches_and_posts_take_no_time_are_planned_for(tmp_path: Path) -> None:
    for launch, posting in ((0, 0), (0, 1e-6), (1e-6, 0)):
        path = tmp_path / f"{launch} {posting}.yaml"
        values = preset_values(load_cluster("a2").with_values(launch=float(launch), posting=float(posting)))
        path.write_text("".join(f"{key}: {value}\n" for key, value in values.items()), encoding="utf-8")
        model = model_of(Documents([5000, 40, 700]), Topology(2, 2, str(path)), AttentionConfig(heads=8, head_dim=64))
        assert PlacementSearch(model).score.total >= model.bound


def test_flexible_groups_of_whole_nodes_split_heads_inside_nodes_alone() -> None:
    """Two giants over two nodes each and a middle one: no group is smaller than a node, and none is wider."""
    documents, topology = Documents([64000, 64000, 30000, 30, 30]), Topology(6, 2, "a2")
    model = model_of(documents, topology, AttentionConfig(heads=8, head_dim=64))
    policy = PlacementPolicy(0.1, NEVER, flexible=True, wide=False, group_nodes=1)
    placement = DocumentPlacer(model).place_flexible(policy)
    assert placement is not None
    ((size, members),) = placement.split.items()
    assert size == 2
    nodes = {doc: members.rank[members.doc == doc].tolist() for doc in (0, 1, 2)}
    assert len(nodes[0]) == len(nodes[1]) == 2 and not set(nodes[0]) & set(nodes[1])
    assert all(members.share[members.doc == doc].sum() == pytest.approx(1) for doc in (0, 1, 2))
    assert sorted(placement.whole.doc.tolist()) == [3, 4]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 3))
def test_equal_groups_are_as_even_as_the_best_of_all(costs: list[int], groups: int) -> None:
    """The largest differencing method is at most 7/6 of the least for two groups (Fischetti and Martello 1987)."""
    costs = sorted(costs, reverse=True)
    group = karmarkar_karp([float(cost) for cost in costs], groups)
    assert len(group) == len(costs) and set(group) <= set(range(groups))
    most = np.bincount(group, costs, groups).max()
    least = min(np.bincount(each, costs, groups).max() for each in itertools.product(range(groups), repeat=len(costs)))
    assert most <= (7 / 6 if groups == 2 else 4 / 3) * least


def test_a_document_with_more_work_than_an_equal_group_gets_a_wider_one() -> None:
    """Two long documents, each of a quarter of all work, on 16 ranks in groups of 2."""
    documents, topology = Documents([8000, 8000, *[2000] * 32]), Topology(2, 8, "a2")
    placement = DocumentPlacer(model_of(documents, topology)).place_equal(PlacementPolicy(0, 0, equal=2))
    assert placement is not None and not len(placement.whole.doc)
    size_of = {doc: size for size, members in placement.split.items() for doc in members.doc.tolist()}
    assert size_of[0] == size_of[1] > 2 and all(size_of[doc] == 2 for doc in range(2, 34))
    busy = model_of(documents, topology).score(placement).busy
    assert busy.max() < 1.15 * busy.mean()


def test_documents_over_several_nodes_travel_beside_each_other_in_parts() -> None:
    """Six equal documents, each on two nodes: their redistributions hide behind the attention of others."""
    documents, topology = Documents([40000] * 6), Topology(4, 8, "a800")
    placement = DocumentPlacer(model_of(documents, topology)).place_equal(PlacementPolicy(0, 0, equal=16))
    assert placement is not None and set(placement.split) == {16}
    seconds = [
        simulate_plan(
            plan_from_placement(replace(placement, parts_across=parts), documents, documents, topology, MHA),
            cluster_of(topology),
        ).total
        for parts in (1, 3)
    ]
    assert seconds[1] < 0.97 * seconds[0]
    assert model_of(documents, topology).in_parts(placement).parts_across > 1
