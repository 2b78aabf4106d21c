"""What published systems do is exact, where it is a plan, and it is what they do."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published.rings import Group, grouped_rings
from benchmarks.published.systems import SYSTEMS, ulysses, usp, zeppelin
from benchmarks.published.systems.even import build_gathered, eod_lengths
from benchmarks.published.systems.head_groups import differencing, flexible_groups
from benchmarks.published.systems.ring_groups import Thresholds, power_of_two, power_of_two_groups, zoned_groups
from mindspeed_cp import AttentionConfig, Documents, PlanError, Topology, verify_plan
from mindspeed_cp.plan.program import Plan
from tests.benchmarks.published.cases import LENGTHS, case

ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=16)
GROUPS: list[Group] = [tuple(range(8)), (0,), (2, 3), (5,), (1,), (4, 5, 6, 7), (0, 1, 2, 3), (1, 2), (0,), (7,)]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_way_of_every_system_is_exact(system: str) -> None:
    seen: dict[int, Plan] = {}
    for nodes, per_node, cluster in ((2, 4, "a800"), (1, 4, "a2")):
        candidates = SYSTEMS[system](case(nodes, per_node, cluster))
        assert candidates, "8 heads are enough for 8 ranks"
        seen |= {id(candidate.plan): candidate.plan for candidate in candidates}
    assert seen
    for plan in seen.values():
        verify_plan(plan)


@pytest.mark.parametrize("nodes, per_node", [(1, 1), (1, 4), (2, 4), (3, 3), (5, 1)])
def test_an_all_gather_crosses_to_each_node_once(nodes: int, per_node: int) -> None:
    documents, topology = Documents(LENGTHS), Topology(nodes, per_node)
    plan = build_gathered(documents, topology, ATTENTION)
    verify_plan(plan)
    items = plan.forward.fetch.items
    across = items["src"] // per_node != items["dst"] // per_node
    assert items["rows"][across].sum() == documents.tokens * (nodes - 1)
    assert items["rows"].sum() == documents.tokens * (topology.ranks - 1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rings_of_groups_that_share_ranks_are_exact(interleaved: bool) -> None:
    plan = grouped_rings("rings", Documents(LENGTHS), Topology(2, 4), ATTENTION, GROUPS, interleaved)
    verify_plan(plan)
    for doc, group in enumerate(GROUPS):
        held = plan.layout.spans["rank"][plan.layout.spans["doc"] == doc]
        assert set(held.tolist()) <= set(group)


def test_what_a_ring_sends_is_that_of_its_group_alone() -> None:
    documents = Documents([4000, 600])
    plan = grouped_rings("rings", documents, Topology(2, 4), ATTENTION, [(4, 5, 6, 7), (0,)], False)
    sent = np.concatenate([part.forward.fetch.items for part in plan.parts_or_self])
    assert set(sent["src"].tolist()) == set(sent["dst"].tolist()) == {4, 5, 6, 7}
    assert set(((sent["dst"] - sent["src"]) % 4).tolist()) == {1}, "each rank sends to the next one of the ring"


def test_a_ring_that_loses_a_message_is_not_exact() -> None:
    plan = grouped_rings("rings", Documents([4000]), Topology(1, 4), ATTENTION, [(0, 1, 2, 3)], False)
    plan.forward.fetch.items["rows"][0] -= 1
    plan.forward.fetch.runs["rows"][plan.forward.fetch.items["first"][0]] -= 1
    with pytest.raises(PlanError):
        verify_plan(plan)


@pytest.mark.parametrize("ranks, tensor_parallel, unit", [(4, 1, 8), (4, 2, 8), (4, 3, 24), (16, 8, 128)])
def test_documents_are_padded_to_multiples_of_cp_lcm_2_tp(ranks: int, tensor_parallel: int, unit: int) -> None:
    lengths = np.array([0, 1, unit - 1, unit, unit + 1, 5 * unit])
    padded = eod_lengths(lengths, ranks, tensor_parallel)
    assert padded.tolist() == [0, unit, unit, unit, 2 * unit, 5 * unit]


def test_ulysses_needs_a_head_for_every_rank() -> None:
    assert ulysses(case(heads=4, kv_heads=2)) == []
    assert len(ulysses(case(heads=8, kv_heads=2))) == 1


def test_usp_tries_degrees_up_to_the_heads_but_not_all_ranks() -> None:
    assert [candidate.label for candidate in usp(case(heads=8))] == ["USP, Ulysses 2", "USP, Ulysses 4"]
    assert [candidate.label for candidate in usp(case(nodes=4, heads=8))] == [
        "USP, Ulysses 2",
        "USP, Ulysses 4",
        "USP, Ulysses 8",
    ]


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


def test_zeppelin_tries_a_remap_to_equal_tokens_for_linear_layers() -> None:
    plans = {candidate.label: candidate.plan for candidate in zeppelin(case())}
    remapped = [plan for label, plan in plans.items() if "remap" in label]
    assert remapped
    for plan in remapped:
        held = (plan.linear_layout or plan.layout).token_counts
        assert held.max() - held.min() <= 1


def test_differencing_divides_as_karmarkar_and_karp_do() -> None:
    """8 and 7 differ by 1, 6 and 5 by 1, these by 0; 4 is left: 8 + 6 and 7 + 5 + 4 (their example)."""
    part = differencing(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2)
    sums = np.bincount(part, [8.0, 7.0, 6.0, 5.0, 4.0], 2)
    assert sorted(sums.tolist()) == [14.0, 16.0]
    assert np.bincount(differencing(np.ones(12), 4)).tolist() == [3] * 4


def test_flexible_groups_are_as_soon_done_as_can_be() -> None:
    """Two ranks for the longest document, one for each of the others; nothing is done before 4."""
    work = np.array([8.0, 4.0, 4.0])
    degree, first = flexible_groups({size: work / size for size in (1, 2, 4)}, 4)
    assert degree.tolist() == [2, 1, 1] and first.tolist() == [0, 2, 3]
