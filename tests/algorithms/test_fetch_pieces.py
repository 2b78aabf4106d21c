"""Fetched keys in pieces: proved, with the same bytes, slots and tiles; the default is what a simulation finds faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms.kv_fetch.pieces import cut_fetches
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.plan.program import DIRECTIONS
from mindspeed_cp.plan.transfers import traffic
from mindspeed_cp.plan.verify import peak_bytes
from mindspeed_cp.simulate.simulator import simulate_plan
from tests.algorithms.test_kv_fetch import placements, plan_of

MHA = AttentionConfig(heads=16, head_dim=8)
GQA = AttentionConfig(heads=16, kv_heads=4, head_dim=8)
LENGTHS = (9000, 2200, 40, 1700, 1, 900, 650)

#: Plans that fetch over relays, from owners, and between groups of nodes that split heads.
PLANS: dict[str, tuple[AttentionConfig, Topology, tuple[int, ...], dict[str, Any]]] = {
    "relays": (MHA, Topology(4, 2, "a800"), LENGTHS, {"head_split": False}),
    "slots in turn": (GQA, Topology(8, 2, "a800"), (20000, 30), {"head_split": False, "prefetch": 1}),
    "owners": (GQA, Topology(2, 4, "a800"), LENGTHS, {"head_split": False, "routing": False}),
    "groups of nodes": (AttentionConfig(heads=4, head_dim=8), Topology(4, 2, "a800"), (30000, 500, 700, 90), {}),
}


def built(name: str, pieces: int | None = 1) -> Plan:
    attention, topology, lengths, options = PLANS[name]
    return build_plan(
        Documents(lengths), topology, attention, "hierarchical", simulated_placements=1, fetch_pieces=pieces, **options
    )


@settings(max_examples=100, deadline=None)
@given(placements(), st.booleans(), st.integers(1, 4), st.integers(2, 5))
def test_any_placement_is_proved(placed, routing, prefetch, pieces):  # type: ignore[no-untyped-def]
    layout, topology, attention = placed
    verify_plan(cut_fetches(plan_of(layout, topology, attention, routing=routing, prefetch=prefetch), pieces))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_pieces_are_proved_and_have_the_bytes_and_the_slots_of_the_whole(name: str, pieces: int) -> None:
    plan, cut = built(name), built(name, pieces)
    verify_plan(cut)
    assert traffic(cut).tolist() == traffic(plan).tolist()
    for direction in DIRECTIONS:
        peak, peak_cut = peak_bytes(plan, direction), peak_bytes(cut, direction)
        assert all(peak_cut[name].tolist() == peak[name].tolist() for name in ("kv", "gradients", "redistributed"))
        assert (peak_cut["total"] <= 1.16 * peak["total"]).all(), "pieces of two steps are staged at once"
    for part, part_cut in zip(plan.parts_or_self, cut.parts_or_self, strict=True):
        factor = pieces if len(part.forward.fetch) else 1
        for direction in DIRECTIONS:
            program, program_cut = getattr(part, direction), getattr(part_cut, direction)
            assert program_cut.steps == factor * program.steps
            assert len(program_cut.fetch) >= len(program.fetch) and len(program_cut.reduce) >= len(program.reduce)
    assert plan.work().sum(1).tolist() == cut.work().sum(1).tolist()


def test_a_piece_is_computed_as_soon_as_it_is_there_and_its_gradient_leaves_at_once() -> None:
    """Each of two pieces is due just before it is computed, and the first does not wait for the second."""
    plan = built("owners", 2)
    forward, backward = plan.forward, plan.backward
    for content in forward.contents[forward.contents["slot"] > 0]:
        rank, slot, step = (int(content[name]) for name in ("rank", "slot", "step"))
        fetch, reduce = forward.fetch.items, backward.reduce.items
        arriving = fetch[(fetch["dst"] == rank) & (fetch["dst_slot"] == slot)]
        leaving = reduce[(reduce["src"] == rank) & (reduce["src_slot"] == slot)]
        assert step - 1 in arriving["done"] and step + 1 in leaving["start"]
    first = forward.fetch.items["done"].min()
    assert (forward.fetch.items["done"] > first).any()


def test_both_directions_have_the_same_tiles_under_dropout() -> None:
    attention, topology, lengths, options = PLANS["relays"]
    plan = build_plan(
        Documents(lengths), topology, replace(attention, dropout=0.1), "hierarchical", fetch_pieces=2, **options
    )
    verify_plan(plan)

    def calls(direction: str, rank: int) -> list[tuple[int, ...]]:
        return sorted(
            tuple(int(tile[name]) for name in ("q_row", "q_rows", "k_rows", "mask", "doc", "q_pos", "k_pos"))
            for part in plan.parts_or_self
            for tile in getattr(part, direction).tiles(rank)
        )

    for rank in range(topology.ranks):
        assert calls("forward", rank) == calls("backward", rank)


def test_plans_without_fetches_stay_as_they_are() -> None:
    plan = build_plan(Documents([500] * 8), Topology(1, 8), MHA, "hierarchical")
    assert cut_fetches(plan, 4) is plan
    fetching = built("relays")
    assert cut_fetches(fetching, 1) is fetching


#: Batches in which two pieces are faster, and in which they are not.
FASTER, NOT_FASTER = ("wikipedia", 32, 5), ("wikipedia", 128, 4)


@pytest.mark.parametrize(("batch", "pieces"), [(FASTER, 2), (NOT_FASTER, 1)])
def test_the_default_is_what_a_simulation_finds_faster(batch: tuple[str, int, int], pieces: int) -> None:
    name, ranks, number = batch
    draw = np.random.default_rng([number, ["wikipedia", "prolong"].index(name), 0])
    documents = Documents(sample_batch(name, ranks * 4096, int(draw.integers(2**31))))
    attention = AttentionConfig(heads=32, kv_heads=8, head_dim=128)
    topology = Topology(ranks // load_cluster("a800").ranks_per_node, 8, "a800")
    default, whole = (
        build_plan(documents, topology, attention, "hierarchical", robustness=0.0, **options)
        for options in ({}, {"fetch_pieces": 1})
    )
    assert any(len(part.forward.fetch) for part in whole.parts_or_self)
    steps = [part.forward.steps * (pieces if len(part.forward.fetch) else 1) for part in whole.parts_or_self]
    assert [part.forward.steps for part in default.parts_or_self] == steps
    cluster = cluster_of(topology)
    seconds = simulate_plan(whole, cluster).total
    if pieces > 1:
        assert simulate_plan(default, cluster).total < seconds
    else:
        assert simulate_plan(cut_fetches(whole, 2), cluster).total >= seconds
