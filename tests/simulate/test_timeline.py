"""The modelled timeline against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.cluster import ComputeCost, LayerCost, load_cluster
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.simulate.simulator import simulate_plan

MHA = AttentionConfig(heads=32, head_dim=128)
NO_LINEAR = LayerCost(0.0, 4096)


def test_one_rank_computes_and_waits_for_nothing() -> None:
    cluster = load_cluster("a2").with_ranks(1)
    made = simulate_plan(build_plan(Documents([5000, 300]), Topology(1, 1), MHA), cluster)
    cost = ComputeCost(cluster, MHA)
    pairs, rows = np.array([5000 * 5001 / 2, 300 * 301 / 2]), np.array([5000, 300])
    expected = sum(float(cost.attention_seconds(pairs, rows, 0, back).sum()) for back in (False, True))
    linear = sum(float(cost.linear_layer_seconds(5300, back)) for back in (False, True))
    assert made.total == pytest.approx(expected + 2 * cluster.launch + linear)
    assert made.waiting == pytest.approx([0.0], abs=1e-12)


@pytest.mark.parametrize("name", ["a2", "a800"])
def test_a_ring_that_only_transfers_takes_its_messages_one_after_the_other(name: str) -> None:
    """Without compute, a full ring forward is (n - 1) hops of a block over one link."""
    cluster = load_cluster(name).with_values(peak_flops=1e21, launch=0.0, posting=0.0)
    full = AttentionConfig(heads=32, head_dim=128, mask="full")
    plan = build_plan(Documents([8 * 4096]), Topology(1, 8), full, "ring")
    made = simulate_plan(plan, cluster, NO_LINEAR)
    block = 4096 * 32 * 256 * 2
    hop = block / cluster.effective_pair + cluster.in_node_latency
    assert made.steps_forward[:, -1, 2].max() == pytest.approx(7 * hop, rel=0.01)


def test_an_exchange_over_a_mesh_uses_all_links_and_one_over_a_switch_shares_its_port() -> None:
    full = AttentionConfig(heads=32, head_dim=128, mask="full")
    plan = build_plan(Documents([8 * 4096]), Topology(1, 8), full, "all_gather")
    block = 4096 * 32 * 256 * 2
    mesh = load_cluster("a2").with_values(peak_flops=1e21, launch=0.0, posting=0.0)
    assert simulate_plan(plan, mesh, NO_LINEAR).steps_forward[:, -1, 2].max() == pytest.approx(
        block / mesh.effective_pair, rel=0.01
    )
    switch = load_cluster("a800").with_values(peak_flops=1e21, launch=0.0, posting=0.0)
    expected = 7 * block / switch.effective_rank
    assert simulate_plan(plan, switch, NO_LINEAR).steps_forward[:, -1, 2].max() == pytest.approx(expected, rel=0.01)


def test_nics_are_shared_by_their_ranks() -> None:
    """Two ranks of a node with one NIC take twice as long across as two with one each."""
    full = AttentionConfig(heads=32, head_dim=128, mask="full")
    plan = build_plan(Documents([4 * 4096]), Topology(2, 2), full, "all_gather")
    own = load_cluster("a2").with_ranks(2).with_values(peak_flops=1e21, launch=0.0, posting=0.0)
    shared = own.with_values(nics_per_node=1)
    block = 4096 * 32 * 256 * 2
    for cluster, messages in ((own, 2), (shared, 4)):
        actual = simulate_plan(plan, cluster, NO_LINEAR).steps_forward[:, -1, 2].max()
        assert actual == pytest.approx(messages * block / cluster.effective_nic, rel=0.01)


@pytest.mark.parametrize("algorithm", ["ring", "hybrid", "direct", "hierarchical"])
def test_time_is_compute_linear_layers_and_waiting(algorithm: str) -> None:
    documents = Documents(sample_batch("wikipedia", 8 * 4096, 3))
    topology = Topology(2, 4, "a2")
    plan = build_plan(documents, topology, MHA, algorithm)
    made = simulate_plan(plan, load_cluster("a2").with_ranks(4))
    assert made.waiting.min() >= -1e-9
    assert made.total >= (made.compute + made.linear).max() - 1e-12
    for turns in (made.steps_forward, made.steps_backward):
        assert (np.diff(turns, axis=2) >= -1e-12).all() and (turns[:, 1:, 0] >= turns[:, :-1, 2] - 1e-12).all()
