"""The KV fetch: proved for any layout, keys cross once to a node, and every NIC carries its part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, Topology, verify_plan
from mindspeed_cp.algorithms.kv_fetch.programs import staged
from mindspeed_cp.layout import contiguous, zigzag
from mindspeed_cp.layout.layout import weighted
from mindspeed_cp.plan import Plan

SMALL = AttentionConfig(heads=2, head_dim=8)


def plan_of(layout, topology, attention=SMALL, **how):  # type: ignore[no-untyped-def]
    programs = staged(layout, layout, attention, topology, **how)
    return Plan("staged", attention, topology, layout, layout, layout, layout, *programs)


@st.composite
def placements(draw):  # type: ignore[no-untyped-def]
    """Documents on any ranks of up to 4 nodes of up to 4, and any attention."""
    nodes, per_node = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = nodes * per_node
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=7))
    groups = [draw(st.permutations(range(ranks)))[: draw(st.integers(1, ranks))] for _ in lengths]
    mask = draw(st.sampled_from(["causal", "full"]))
    reach = st.integers(0, 30)
    window = draw(st.none() | st.tuples(reach, st.just(0) if mask == "causal" else reach))
    attention = AttentionConfig(2, head_dim=8, mask=mask, window=window, alibi=draw(st.booleans()))
    make = draw(st.sampled_from([zigzag, contiguous]))
    return make(Documents(lengths), ranks, groups), Topology(nodes, per_node), attention


@settings(max_examples=150, deadline=None)
@given(placements(), st.booleans(), st.integers(1, 4))
def test_any_placement_is_proved(placed, routing, prefetch):  # type: ignore[no-untyped-def]
    layout, topology, attention = placed
    verify_plan(plan_of(layout, topology, attention, routing=routing, prefetch=prefetch))


def crossing(plan: Plan) -> np.ndarray:
    items, per = plan.forward.fetch.items, plan.topology.ranks_per_node
    return items[items["src"] // per != items["dst"] // per]


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_keys_cross_to_a_node_once_with_routing(nodes: int) -> None:
    """Each of the other nodes gets what it sees of a node's rows once; without routing, once for every rank."""
    topology, documents = Topology(nodes, 4), Documents([4096])
    layout = zigzag(documents, topology.ranks)
    full = AttentionConfig(2, head_dim=8, mask="full")
    routed, straight = (plan_of(layout, topology, full, routing=routing) for routing in (True, False))
    assert crossing(routed)["rows"].sum() == 4096 * (nodes - 1)
    assert crossing(straight)["rows"].sum() == 4096 * (nodes - 1) * 4
    per_rank = np.bincount(crossing(routed)["src"], crossing(routed)["rows"], topology.ranks)
    assert per_rank.max() <= per_rank.min() + 8 * nodes, "every NIC carries the same"


@pytest.mark.parametrize("routing", [False, True])
def test_slots_that_many_nodes_use_in_turn_are_proved(routing: bool) -> None:
    """More nodes than slots: the keys of a later node take the slot of an earlier one."""
    topology = Topology(10, 2)
    plan = plan_of(zigzag(Documents([400]), 20), topology, AttentionConfig(2, head_dim=8, mask="full"), routing=routing)
    starts = np.unique(crossing(plan)["start"])
    assert len(starts) > 2, "not all keys are sent in the first steps"
    verify_plan(plan)


def test_a_large_message_goes_over_all_nics_of_its_node() -> None:
    """One rank of node 0 shares a document with one of node 1: three neighbours each carry a quarter of it."""
    layout = contiguous(Documents([8000]), 8, [[0, 4]])
    plan = plan_of(layout, Topology(2, 4), AttentionConfig(2, head_dim=8, mask="full"))
    verify_plan(plan)
    across = crossing(plan)
    out = np.bincount(across["src"], across["rows"], 8)
    assert out.tolist() == [1000] * 8, "4,000 rows each way"
    assert sorted(set(zip(across["src"] % 4, across["dst"] % 4, strict=True))) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    back = plan.backward.reduce.items
    home = back[(back["dst"] == 0) & (back["dst_slot"] == 0)]
    assert home["rows"].sum() == 4000 and set(home["src"].tolist()) == {1, 2, 3, 4}


def test_ranks_that_do_not_share_a_document_do_not_relay_it_where_enough_do() -> None:
    layout = zigzag(Documents([4096, 60, 60]), 8, [[0, 1, 2, 3, 4, 5, 6], [7], [7]])
    plan = plan_of(layout, Topology(2, 4))
    verify_plan(plan)
    touched = np.concatenate([plan.forward.fetch.items[end] for end in ("src", "dst")])
    assert 7 not in touched


@settings(max_examples=100, deadline=None)
@given(st.data(), st.booleans())
def test_shares_are_exact_to_a_token_or_two_and_balance_causal_work(data, mirrored):  # type: ignore[no-untyped-def]
    ranks = data.draw(st.integers(1, 6))
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))
    documents = Documents(lengths)
    members = [data.draw(st.permutations(range(ranks)))[: data.draw(st.integers(1, ranks))] for _ in lengths]
    doc = np.repeat(np.arange(len(lengths)), [len(group) for group in members])
    rank = np.array([r for group in members for r in group])
    share = np.array([data.draw(st.floats(0.05, 1)) for _ in rank])
    layout = weighted(documents, ranks, doc, rank, share, mirrored)
    layout.check()
    for d, length in enumerate(lengths):
        whole = share[doc == d].sum()
        for r, s in zip(rank[doc == d], share[doc == d], strict=True):
            rows = (layout.documents.document_of(layout.tokens(int(r))) == d).sum()
            assert abs(rows - s / whole * length) <= 3
            if mirrored and rows:
                pos = layout.positions(int(r))[layout.documents.document_of(layout.tokens(int(r))) == d]
                work = (pos + 1).sum()
                assert abs(work - s / whole * length * (length + 1) / 2) <= 3 * length + 3
