"""Rings on all links of a mesh: the cycles share no link, plans are proved, and no message leaves a cycle."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, simulate_plan, verify_plan
from mindspeed_cp.algorithms.hamilton_cycles import hamilton_cycles
from mindspeed_cp.algorithms.mesh_ring import Pieces
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.layout import zigzag
from mindspeed_cp.plan import traffic


def links_of(cycles: np.ndarray) -> list[tuple[int, int]]:
    """All directed links of the cycles."""
    return [link for cycle in cycles.tolist() for link in pairwise([*cycle, cycle[0]])]


@pytest.mark.parametrize(
    "ranks", [*range(2, 14), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(14, 24))]
)
def test_cycles_of_a_node_share_no_link_and_are_as_many_as_exist(ranks: int) -> None:
    """n - 1 directed cycles would use all links; for 4 and 6 ranks n - 2 are the most (Tillson 1980)."""
    cycles = hamilton_cycles(1, ranks)
    assert all(sorted(cycle) == list(range(ranks)) for cycle in cycles.tolist())
    assert len(set(links_of(cycles))) == len(links_of(cycles)) == len(cycles) * ranks
    is_short = ranks in (4, 6) or (ranks % 2 == 0 and ranks > 16)
    assert len(cycles) == ranks - 1 - is_short


@pytest.mark.parametrize("per_node", range(1, 10))
@pytest.mark.parametrize("nodes", [2, 3])
def test_cycles_over_nodes_share_no_link_and_no_nic(nodes: int, per_node: int) -> None:
    cycles = hamilton_cycles(nodes, per_node)
    assert all(sorted(cycle) == list(range(nodes * per_node)) for cycle in cycles.tolist())
    links = links_of(cycles)
    assert len(set(links)) == len(links)
    across = [(a, b) for a, b in links if a // per_node != b // per_node]
    assert len({a for a, _ in across}) == len({b for _, b in across}) == len(across) == nodes * len(cycles)
    assert all(b // per_node == (a // per_node + 1) % nodes for a, b in across)
    assert len(cycles) == (per_node if per_node % 2 == 0 else max(1, per_node - 1))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from(["zigzag", "contiguous", "balanced"]),
    st.sampled_from([None, (40, 0)]),
)
def test_random_plans_are_proved_and_messages_stay_on_cycles(
    lengths: list[int], nodes: int, per_node: int, layout: str, window: tuple[int, int] | None
) -> None:
    attention = AttentionConfig(4, 2, 16, mask="causal", window=window)
    plan = build_plan(Documents(lengths), Topology(nodes, per_node), attention, "ring", layout=layout, cycles="all")
    verify_plan(plan)
    cycles = hamilton_cycles(nodes, per_node)
    sent = plan.forward.fetch.items
    assert {(int(a), int(b)) for a, b in zip(sent["src"], sent["dst"], strict=True)} <= set(links_of(cycles))
    for step in range(plan.forward.steps):
        links = sent[sent["start"] == step][["src", "dst"]]
        assert len(np.unique(links)) == len(links)  # a message for each link and step


def test_cross_attention_is_proved() -> None:
    attention, keys = AttentionConfig(4, 2, 16, mask="full"), Documents([900, 0, 31])
    plan = build_plan(Documents([70, 9, 400]), Topology(1, 8), attention, "ring", keys, cycles="all")
    verify_plan(plan)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_every_cycle_carries_an_equal_share_and_steps_are_even(mask: str) -> None:
    """Of one long document: the bytes of the ring, over seven links of each rank in place of one, and equal work in the
    steps, as in the ring."""
    attention, tokens = AttentionConfig(8, 2, 64, mask=mask), 8 * 2 * 7 * 64
    ring, mesh = (
        build_plan(Documents([tokens]), Topology(1, 8), attention, "ring", cycles=cycles) for cycles in ("one", "all")
    )
    # Under a causal mask the ring's last block rests half: shares stop by pieces, at other ranks for each cycle.
    assert traffic(mesh)["total"].sum() <= traffic(ring)["total"].sum()
    items = mesh.forward.fetch.items
    per_link = np.zeros((8, 8), np.int64)
    np.maximum.at(per_link, (items["src"], items["dst"]), items["rows"])
    assert (per_link[~np.eye(8, dtype=bool)] == tokens // 8 // 7).all()
    work = mesh.work()[:, 1:]
    assert work.max() <= 1.25 * work.mean() if mask == "causal" else work.max() == work.min()


def test_short_runs_travel_whole_and_in_turn() -> None:
    documents = Documents([3] * 200 + [4000])
    keys = zigzag(documents, 4)
    pieces = Pieces.of(keys, 3)
    rows = pieces.stop - pieces.start
    assert rows.sum() == documents.tokens and (rows > 0).all()
    assert set(rows[pieces.doc < 200]) <= {1, 2, 3}
    for rank in range(4):
        shares = np.bincount(pieces.cycle[pieces.owner == rank], rows[pieces.owner == rank], 3)
        assert shares.max() - shares.min() <= 6


def test_over_links_alone_it_takes_a_seventh_of_a_rings_time() -> None:
    """Devices that compute in no time, under a full mask: a step takes a seventh of a block over a link."""
    cluster = load_cluster("a2").with_values(peak_flops=1e21, launch=0.0, posting=0.0, in_node_latency=0.0)
    attention, tokens = AttentionConfig(32, head_dim=128, mask="full"), 8 * 7 * 1024
    spent = {}
    for cycles in ("one", "all"):
        plan = build_plan(Documents([tokens]), Topology(1, 8), attention, "ring", cycles=cycles)
        spent[cycles] = simulate_plan(plan, cluster, LayerCost(0.0, 4096)).steps_forward[:, -1, 2].max()
    assert spent["one"] / spent["all"] == pytest.approx(7, rel=0.01)
