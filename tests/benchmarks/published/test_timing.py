"""Times are those of the project's simulator; what is added to it does what it says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published.rings import RoutedLinkQueues, grouped_rings, routing_pays
from benchmarks.published.systems import (
    dist_ca,
    dynamic_cp,
    magi_attention,
    ours,
    ring,
    ulysses,
    usp,
    zeppelin,
)
from benchmarks.published.systems.even import LOOKED_AT
from benchmarks.published.timing import Candidate, MicroBatchTime, fastest, layer, simulate_layers
from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.cluster import Cluster, load_cluster
from mindspeed_cp.plan.transfers import GRADIENT_BYTES
from mindspeed_cp.simulate.link_queues import LinkQueues
from mindspeed_cp.simulate.simulator import simulate_plan
from tests.benchmarks.published.cases import case

#: A tolerance for sums in another order.
NEAR = 1e-9


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


def through_layers(
    candidate: Candidate, cluster: Cluster, layers: int, gradient: int = GRADIENT_BYTES
) -> MicroBatchTime:
    return simulate_layers(
        candidate.plan, cluster, layers, tiles=candidate.tiles, links=candidate.links, gradient=gradient
    )


def test_tiles_that_are_counted_once_give_the_same_layers() -> None:
    problem = case()
    for candidate in ours(problem):
        for layers in (1, 3, 32):
            actual, expected = (
                through_layers(candidate, problem.cluster, layers),
                simulate_layers(candidate.plan, problem.cluster, layers),
            )
            assert actual.seconds == pytest.approx(expected.seconds, rel=NEAR)
            assert actual.layer_backward == pytest.approx(expected.layer_backward, rel=NEAR)


def test_evenly_spaced_ranks_stand_for_all_of_an_even_ring() -> None:
    problem = case(nodes=5, per_node=8)
    assert problem.topology.ranks > LOOKED_AT
    (candidate,) = ring(problem)
    assert candidate.representative is not None and len(np.unique(candidate.representative)) == LOOKED_AT
    exact = layer(Candidate("all", candidate.plan), problem.cluster).total
    assert layer(candidate, problem.cluster).total == pytest.approx(exact, rel=0.02)


def test_a_layer_without_waits_is_the_work_of_the_busiest_rank() -> None:
    problem = case()
    cluster = problem.cluster.with_values(posting=0.0)
    for candidate in dist_ca(problem):
        actual = layer(candidate, cluster)
        assert candidate.free_transfers and not actual.exposed.any()
        with_waits = layer(Candidate("", candidate.plan), cluster)
        np.testing.assert_allclose(actual.busy, with_waits.busy, rtol=NEAR)
        assert actual.busy.max() <= actual.total * (1 + NEAR) and actual.total < with_waits.total
        assert candidate.least(cluster) <= actual.total
        assert layer(candidate, problem.cluster).total == actual.total  # nor does it post


def test_no_way_that_is_left_out_is_faster() -> None:
    problem = case()
    for candidates in (zeppelin(problem), dynamic_cp(problem)):
        every = [layer(candidate, problem.cluster).total for candidate in candidates]
        assert fastest(candidates, problem.cluster)[1].total == min(every)
        for candidate, seconds in zip(candidates, every, strict=True):
            assert candidate.least(problem.cluster) <= seconds


def test_gradients_in_bf16_take_half_the_bytes_of_gradients_alone() -> None:
    problem = case(cluster="a800", kv_heads=8)
    slow = problem.cluster.with_values(nic_bandwidth=1e7)  # keys 1, and in the backward keys 1 and gradients 2
    (candidate,) = ring(problem)
    ratio = layer(candidate, slow, gradient=2).total / layer(candidate, slow).total
    assert ratio == pytest.approx(3 / 4, abs=0.05)
    ratio = through_layers(candidate, slow, 32, gradient=2).seconds / through_layers(candidate, slow, 32).seconds
    assert ratio == pytest.approx(3 / 4, abs=0.05)


def test_documents_of_one_rank_hide_transfers_beside_rings() -> None:
    attention = AttentionConfig(heads=32, head_dim=128)
    documents, groups = Documents([16000, *[16000] * 8]), [tuple(range(8)), *((rank,) for rank in range(8))]
    cluster = load_cluster("a800").with_ranks(4)
    times = [
        layer(
            Candidate("", grouped_rings("", documents, Topology(2, 4), attention, groups, interleaved)),
            cluster,
        ).total
        for interleaved in (False, True)
    ]
    assert times[1] < 0.9 * times[0]


def test_a_routed_message_takes_all_nics_and_no_longer_than_three_hops() -> None:
    cluster, size = load_cluster("a800").with_values(in_node_latency=0.0, network_latency=0.0), 64e6
    links, plain = RoutedLinkQueues(cluster, 2), LinkQueues(cluster, 2)
    src, dst, bytes_, now = np.array([7]), np.array([8]), np.array([size]), np.zeros(1)
    _, end = links.serve(src, dst, bytes_, now)
    _, straight = plain.serve(src, dst, bytes_, now)
    inside, nic = size * 7 / 8 / cluster.effective_rank, size / 4 / cluster.effective_nic
    assert max(inside, nic) < end[0] <= inside + nic + inside
    assert end[0] < straight[0] / 2
    carried = links.busy_seconds[links.kind_of_link == "nic out"]
    np.testing.assert_allclose(carried[:4], size / 4 / cluster.effective_nic)
    assert not carried[4:].any()


@pytest.mark.parametrize("name, pays", [("a800", True), ("h200", True), ("a2", True), ("a3", False)])
def test_routing_pays_where_a_nic_is_slower_than_links_in_the_node(name: str, pays: bool) -> None:
    cluster = load_cluster(name)
    assert routing_pays(cluster) is pays
    src, dst, size, now = np.array([0]), np.array([cluster.ranks_per_node]), np.array([1e8]), np.zeros(1)
    routed, plain = (kind(cluster, 2).serve(src, dst, size, now)[1][0] for kind in (RoutedLinkQueues, LinkQueues))
    assert (routed < plain) is np.bool_(pays) or not pays
