"""hierarchical: proved, deterministic, within its bound, and by its own model never worse than what it is compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement, plan_from_placement
from mindspeed_cp.algorithms.placement.estimate import PlacementModel
from mindspeed_cp.algorithms.placement.loads import MOST_MEMBERS, fill_fewest, water_fill
from mindspeed_cp.algorithms.placement.placer import DocumentPlacer
from mindspeed_cp.algorithms.placement.policy import DocumentShares, Placement, PlacementPolicy
from mindspeed_cp.algorithms.placement.search import min_cross_node_length
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.plan.tiles import count_pairs
from mindspeed_cp.simulate.simulator import simulate_plan

GQA = AttentionConfig(heads=32, kv_heads=8, head_dim=128)
MHA = AttentionConfig(heads=32, head_dim=128)
WORST = {
    "one giant document": [65536],
    "all equal": [4096] * 16,
    "all tiny": [32] * 2048,
    "one document longer than all others": [60000, *[100] * 55],
    "fewer documents than ranks": [9000, 70],
    "nothing": [0, 0],
}


def estimate_of(documents: Documents, topology: Topology, attention: AttentionConfig) -> PlacementModel:
    return PlacementModel(
        documents, documents, topology, attention, cluster_of(topology), LayerCost.for_attention(attention), True
    )


@pytest.mark.parametrize("name", WORST)
@pytest.mark.parametrize("attention", [GQA, MHA], ids=["gqa", "mha"])
def test_worst_cases_are_proved_and_balanced(name: str, attention: AttentionConfig) -> None:
    documents, topology = Documents(WORST[name]), Topology(2, 8, "a2")
    plan = build_plan(documents, topology, attention, "hierarchical", remap="off")
    verify_plan(plan)
    choice = choose_placement(documents, documents, topology, attention, remap="off")
    busy = choice.score.busy
    if documents.tokens > 20000:
        assert busy.max() <= 1.03 * busy.mean(), (name, busy)
    model = estimate_of(documents, topology, attention)
    assert all(choice.score.total <= model.score(other).total * (1 + 1e-12) for other in choice.ranked)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(1, 4), (2, 4), (4, 2), (3, 3), (2, 1)]),
       st.sampled_from(["wikipedia", "prolong"]), st.sampled_from(["off", "auto", "qkv"]))  # fmt: skip
def test_any_batch_is_proved_and_the_same_again(seed, shape, name, remap):  # type: ignore[no-untyped-def]
    documents = Documents(sample_batch(name, 2048 * shape[0] * shape[1], seed))
    topology, attention = Topology(*shape, "h200"), AttentionConfig(heads=8, kv_heads=4, head_dim=128)
    plan, again = (build_plan(documents, topology, attention, "hierarchical", remap=remap) for _ in range(2))
    verify_plan(plan)
    assert plan.layout.same_as(again.layout) and plan.forward_order == again.forward_order
    assert int(plan.layout.token_counts.sum()) == documents.tokens
    for part, other in zip(plan.parts_or_self, again.parts_or_self, strict=True):
        assert np.array_equal(part.forward.fetch.items, other.forward.fetch.items)
        assert np.array_equal(part.forward.contents, other.forward.contents)


@pytest.mark.parametrize("name", ["wikipedia", "prolong"])
@pytest.mark.parametrize("cluster", ["a2", "h200"])
def test_never_worse_by_its_own_model_than_what_others_do(name: str, cluster: str) -> None:
    """Even cuts over all ranks, whole-batch head splits, and power-of-two groups."""
    never = float("inf")
    for seed in range(4):
        documents, topology = Documents(sample_batch(name, 16 * 4096, seed)), Topology(2, 8, cluster)
        estimate = estimate_of(documents, topology, MHA)
        placer = DocumentPlacer(estimate)
        others = [
            PlacementPolicy(1.0, never, power=True),
            PlacementPolicy(0, never, everywhere=True),
            PlacementPolicy(0, 0, everywhere=True),
            PlacementPolicy(0, 0, wide=False, everywhere=True),
        ]
        best = choose_placement(documents, documents, topology, MHA).score.total
        assert all(best <= estimate.score(placer.place(policy)).total * (1 + 1e-9) for policy in others)


def test_the_fastest_of_the_simulated_placements_is_taken() -> None:
    cluster, seconds, plans = load_cluster("a3").with_ranks(4), {}, {}
    for seed in range(3):
        documents, topology = Documents(sample_batch("prolong", 16 * 4096, seed)), Topology(4, 4, "a3")
        for count in (1, 2, 100):
            plans[count] = build_plan(documents, topology, MHA, "hierarchical", simulated_placements=count)
            seconds[seed, count] = simulate_plan(plans[count], cluster).total
        choice = choose_placement(documents, documents, topology, MHA)
        off = [plan_from_placement(each, documents, documents, topology, MHA, prefetch=3) for each in choice.ranked]
        least = min(
            simulate_plan(plan, cluster).total
            for plan, placement in zip(off, choice.ranked, strict=True)
            if not placement.policy.remap
        )
        assert seconds[seed, 100] <= min(least, seconds[seed, 2]) and seconds[seed, 2] <= seconds[seed, 1]
        verify_plan(plans[100])
    assert any(seconds[seed, 100] < seconds[seed, 1] for seed in range(3))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=40), st.floats(1.02, 2.0))
def test_the_bound_of_tokens_is_kept(lengths, room):  # type: ignore[no-untyped-def]
    documents, topology = Documents(lengths), Topology(2, 3)
    bound = int(documents.tokens / 6 * room) + 16
    for count in (1, 3):
        plan = build_plan(
            documents, topology, MHA, "hierarchical", remap="off", max_seqlen_per_dp_cp_rank=bound,
            simulated_placements=count,
        )  # fmt: skip
        assert plan.layout.token_counts.max() <= bound
        verify_plan(plan)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.sampled_from([(2, 4), (1, 3), (3, 1), (2, 2)]),
       st.sampled_from([3, 8]), st.integers(0, 2))  # fmt: skip
def test_a_bound_that_only_just_goes_is_kept_to_the_token(lengths, shape, heads, more):  # type: ignore[no-untyped-def]
    """As when rows are filled up to what all ranks hold."""
    documents, topology = Documents(lengths), Topology(*shape)
    bound = -(-documents.tokens // topology.ranks) + more
    attention = AttentionConfig(heads=heads, head_dim=64)
    plan = build_plan(documents, topology, attention, "hierarchical", max_seqlen_per_dp_cp_rank=bound, remap="off")
    assert plan.layout.token_counts.max() <= bound
    verify_plan(plan)


def test_a_bound_below_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"document 0 has 900 tokens, more than 4 ranks of max_seqlen_per_dp_cp_rank"):
        build_plan(Documents([900]), Topology(1, 4), MHA, "hierarchical", max_seqlen_per_dp_cp_rank=200)
    with pytest.raises(ConfigError, match=r"the batch has 1200 tokens, more than 4 ranks"):
        build_plan(Documents([300] * 4), Topology(1, 4), MHA, "hierarchical", max_seqlen_per_dp_cp_rank=299)


def test_a_topology_that_its_cluster_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster is 'a2', whose nodes have 8 ranks, but the topology has 9"):
        build_plan(Documents([9]), Topology(1, 9, "a2"), MHA, "hierarchical")
    with pytest.raises(ConfigError, match="no such preset"):
        build_plan(Documents([9]), Topology(1, 2, "a9"), MHA, "hierarchical")
    build_plan(Documents([9]), Topology(1, 40), MHA, "hierarchical")  # of no cluster in particular


def test_long_documents_take_the_fewest_ranks_that_have_room() -> None:
    """Any number of them, not a power of two; short ones stay whole."""
    documents = Documents([18000, *[500] * 100])
    choice = choose_placement(documents, documents, Topology(2, 8, "a2"), MHA, head_split=False)
    members = choice.ranked[0].whole
    count = np.bincount(members.doc)
    assert count[0] not in (1, 2, 4, 8, 16) and (count[1:] == 1).mean() > 0.9


def test_short_documents_go_to_the_ranks_that_long_ones_leave_idle() -> None:
    work = np.array([2.5, *[0.1] * 15])  # an equal share is 1 for each of 4 ranks
    model = SimpleNamespace(
        topology=Topology(1, 4), attention=AttentionConfig(1), lengths=(100 * work).astype(np.int64), work=work,
        divided=lambda with_linear: (work, 0 * work), redistribution_work=lambda size: 0 * work,
    )  # fmt: skip
    placed = DocumentPlacer(cast(PlacementModel, model)).place(PlacementPolicy(cut=1.0, split=float("inf"))).whole
    loads = np.bincount(placed.rank, work[placed.doc] * placed.share, 4)
    assert np.bincount(placed.doc)[0] == 3 and loads.max() <= 1.05, loads


def test_with_relays_the_nics_of_a_node_are_one() -> None:
    """Eight NICs, or one of eight times the rate: what crosses between nodes is estimated to take as long."""
    documents, topology = Documents([65536, *[900] * 40]), Topology(2, 8, "a2")
    several = load_cluster("a2")
    single = several.with_values(nics_per_node=1, nic_bandwidth=several.nic_bandwidth * several.nics_per_node)
    placement = choose_placement(documents, documents, topology, GQA, head_split=False).ranked[0]
    totals = []
    for cluster in (several, single):
        layer = LayerCost.for_attention(GQA)
        model = PlacementModel(documents, documents, topology, GQA, cluster, layer, True)
        totals.append(model.score(placement).total)
    assert several.nics_per_node > 1 and totals[0] == pytest.approx(totals[1])


def test_documents_cross_nodes_from_where_both_curves_have_crossed() -> None:
    """At this length a document over two ranks of a node, or over two nodes, is hidden to the byte, and the other too."""
    documents = Documents([100])
    for cluster in ("a2", "h800"):
        model = estimate_of(documents, Topology(2, 8, cluster), MHA)
        length = min_cross_node_length(model)
        pairs, bytes_moved = length**2 / 2, 4 * length / 2 * model.kv_row
        compute = model.cost.attention_seconds(pairs, 1e6) + model.cost.attention_seconds(pairs, 1e6, backward=True)
        between_ranks = bytes_moved / model.cluster.effective_pair / (compute / 2)
        between_nodes = bytes_moved / (model.cluster.nics_per_node * model.cluster.effective_nic) / (compute / 16)
        assert max(between_ranks, between_nodes) == pytest.approx(1, rel=1e-6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.floats(0.1, 500), st.data())
def test_shares_level_loads_as_far_as_limits_allow(loads, work, data):  # type: ignore[no-untyped-def]
    limits = [data.draw(st.sampled_from([0.3, 0.6, float("inf")])) for _ in loads]
    shares = water_fill(loads, work, limits)
    assert sum(shares) == pytest.approx(1)
    if sum(min(limit, 1.0) for limit in limits) < 1:
        return
    assert all(share <= limit + 1e-9 for share, limit in zip(shares, limits, strict=True))
    after = [load + share * work for load, share in zip(loads, shares, strict=True)]
    high = max(a for a, s in zip(after, shares, strict=True) if s > 0)
    for load, share, limit in zip(after, shares, limits, strict=True):
        if share < min(limit, 1.0) - 1e-9:  # one that could take more is as high as the highest that takes any
            assert load >= high - 1e-6 * (1 + high)


def test_shares_fill_the_emptiest_places_first() -> None:
    unlimited = [float("inf")] * 3
    assert water_fill([3.0, 1.0, 2.0], 6.0, unlimited) == pytest.approx([1 / 6, 3 / 6, 2 / 6])
    assert water_fill([9.0, 1.0, 2.0], 3.0, unlimited) == pytest.approx([0, 2 / 3, 1 / 3])


def test_a_document_is_on_few_ranks_where_those_with_room_for_work_have_none_for_tokens() -> None:
    """Ranks are all full of work; each may take .17 of the document, the emptiest next to nothing."""
    loads, limits = [0.9, *[1.2] * 63], [0.001, *[0.17] * 63]
    ranks, shares = fill_fewest(range(64), loads, 1.0, 0.01, 1.0, limits)
    assert 6 <= len(ranks) <= MOST_MEMBERS * 6 and 0 not in ranks
    assert sum(shares) == pytest.approx(1) and max(shares) <= 0.17 + 1e-9
    barely = [0.001, *[0.999] * 2]  # the crumb is needed to hold all of it
    assert sum(fill_fewest(range(3), [1.0] * 3, 1.0, 0.01, 1.0, barely)[1]) == pytest.approx(1)


def test_groups_of_any_size_may_keep_a_bound_of_tokens() -> None:
    documents, topology = Documents([20000, 9000, *[900] * 41]), Topology(2, 8, "a2")
    assert documents.tokens <= 1.5 * 16 * 4200
    ranked = choose_placement(documents, documents, topology, GQA, max_seqlen_per_dp_cp_rank=6300).ranked
    flexible = [placement for placement in ranked if placement.policy.flexible]
    assert flexible
    for placement in flexible:
        plan = plan_from_placement(placement, documents, documents, topology, GQA, token_cap=6300)
        assert plan.layout.token_counts.max() <= 6300
        verify_plan(plan)


def test_a_bound_of_tokens_keeps_documents_on_few_ranks() -> None:
    """Linear layers in a layout of their own leave the work of attention alone: most ranks are then full of tokens."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(7, 1.6, 400).astype(int), 16, 131072)
    lengths = lengths[np.cumsum(lengths) <= 256 * 4096]
    documents, topology = Documents(lengths), Topology(32, 8, "a2")
    for placement in choose_placement(documents, documents, topology, GQA, max_seqlen_per_dp_cp_rank=6144).ranked:
        if placement.policy.can_be_levelled:
            doc, ranks = np.unique(placement.whole.doc, return_counts=True)
            assert ranks[lengths[doc] < 4096].max(initial=0) <= topology.ranks // 8


@pytest.mark.parametrize("name", ["wikipedia", "prolong"])
def test_documents_below_the_zone_of_nodes_stay_in_one(name: str) -> None:
    topology, crossing = Topology(4, 8, "h200"), 0
    for seed in range(6):
        documents = Documents(sample_batch(name, 32 * 4096, seed))
        short = documents.lengths < min_cross_node_length(estimate_of(documents, topology, MHA))
        members = choose_placement(documents, documents, topology, MHA, head_split=False).ranked[0].whole
        pairs = np.unique(np.stack([members.doc, members.rank // 8]), axis=1)
        nodes = np.bincount(pairs[0], minlength=len(documents))
        assert (nodes[short] == 1).all()
        crossing += int((nodes[~short] > 1).sum())
    assert crossing > 0  # others are cut over several


def test_in_the_backward_the_own_node_comes_before_split_heads() -> None:
    """Ranks that are early do what they can do without those of other nodes."""
    documents = Documents([30000, *[2500] * 10, *[300] * 40])
    topology = Topology(2, 4, "a2")
    placement = DocumentPlacer(estimate_of(documents, topology, MHA)).place(PlacementPolicy(0.2, 0.4))
    plan = plan_from_placement(placement, documents, documents, topology, MHA)
    assert [part.algorithm for part in plan.parts] == ["hierarchical", *["node_split"] * (len(plan.parts) - 1)]
    alone = min(3, plan.parts[0].forward.steps)
    assert alone > 1 and plan.backward_order[: alone + 1] == (*((0, step) for step in range(alone)), (1, 0))
    assert plan.forward_order[:2] == ((0, 0), (1, 0))


def test_messages_of_a_step_pair_ranks_so_that_nodes_do_not_meet_at_one() -> None:
    """The four ranks of a node begin with four ranks of the other one."""
    plan = build_plan(
        Documents([8 * 64]), Topology(2, 4), AttentionConfig(heads=8, head_dim=16, mask="full"), "all_gather"
    )
    items = plan.forward.fetch.items
    across = items[(items["src"] // 4 == 0) & (items["dst"] // 4 == 1)]
    assert sorted(across["dst"][:4].tolist()) == [4, 5, 6, 7] and sorted(across["src"][:4].tolist()) == [0, 1, 2, 3]
    for first in range(0, len(items), 8):  # every round: each rank sends once and receives once
        window = items[first : first + 8]
        assert len(set(window["src"].tolist())) == len(set(window["dst"].tolist())) == 8


def test_ranks_that_wait_for_others_compute_more_of_their_local_block_before() -> None:
    """Two ranks share the heads of document 0; the second has a long local document, so few tokens for its work, and
    begins the backward long before the first, whose tokens are many."""
    documents, topology = Documents([8000, 9000, *[100] * 170]), Topology(1, 2, "a2")
    policy = PlacementPolicy(0.5, 0.0)
    whole = DocumentShares.from_lists([(1, [1], [1.0]), *((doc, [0], [1.0]) for doc in range(2, 172))])
    placement = Placement(policy, whole, {2: DocumentShares.from_lists([(0, [0], [1.0])])})
    early = estimate_of(documents, topology, MHA).score(placement).early
    assert early[0] == 0 < early[1] <= 1
    plans = [
        plan_from_placement(placement, documents, documents, topology, MHA, early=share) for share in (None, early)
    ]
    work = []  # of rank 1's local block in the first step of each direction, over all of it
    for plan in plans:
        verify_plan(plan)
        part = plan.parts[0]
        for program in (part.forward, part.backward):
            rows = [program.tiles(1)[program.tiles(1)["step"] == step] for step in (0, 1)]
            pairs = [float(count_pairs(tiles, MHA).sum()) for tiles in rows]
            work.append(pairs[0] / sum(pairs))
    assert work[:3] == pytest.approx([0.5] * 3, abs=0.03), "half before, half after"
    assert work[3] == pytest.approx((1 + early[1]) / 2, abs=0.03)
    before, after = (simulate_plan(plan, cluster_of(topology)).total for plan in plans)
    assert after < before


def test_of_nearly_equal_plans_the_one_that_loses_least_is_taken() -> None:
    """Where posts may take long, a plan with fewer messages is taken, which is at most as much slower as it may be."""
    documents, topology = Documents(sample_batch("wikipedia", 16 * 4096, 3)), Topology(2, 8, "h200")
    cluster = cluster_of(topology)
    slow = cluster.at_range_end(True, ["posting"])
    fastest, robust = (build_plan(documents, topology, MHA, "hierarchical", robustness=share) for share in (0.0, 0.05))
    seconds = [[simulate_plan(plan, each).total for each in (cluster, slow)] for plan in (fastest, robust)]
    assert seconds[0][0] <= seconds[1][0] <= 1.05 * seconds[0][0]
    assert seconds[1][1] < seconds[0][1]
