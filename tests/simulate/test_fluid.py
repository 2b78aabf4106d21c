"""The fluid simulation by hand, and the simulator against it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fluid import FluidDirection, FluidLinks, fair_rates, fluid_ends, ratio
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, simulate_plan
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.plan.transfers import TRANSFER
from mindspeed_cp.simulate.link_queues import LinkQueues
from mindspeed_cp.simulate.simulator import simulate_direction

FREE = 3  # link without a limit


def test_rates_are_max_min_fair() -> None:
    capacity = np.array([1.0, 10.0, 4.0, np.inf])
    rates = fair_rates(np.array([[0, 1, FREE], [0, 2, FREE], [1, 2, FREE], [1, FREE, FREE]]), capacity)
    assert rates == pytest.approx([0.5, 0.5, 3.5, 6.0])


def table_of(messages: list[tuple[int, int, int, int, float]]) -> np.ndarray:
    """Return TRANSFER records of (src, dst, start, done, bytes)."""
    out = np.zeros(len(messages), TRANSFER)
    for row, message in zip(out, messages, strict=True):
        for name, value in zip(("src", "dst", "start", "done", "bytes"), message, strict=True):
            row[name] = value
    return out


def test_a_rank_that_shares_a_nic_goes_on_as_late_as_its_neighbour() -> None:
    """Ranks 0 and 1 send a second of bytes each; rank 1 begins half a second later."""
    cluster = load_cluster("a800").with_values(network_latency=0.0, posting=0.0)
    size = cluster.effective_nic
    table = table_of([(0, 8, 0, 0, size), (1, 16, 0, 0, size)])
    kernels, begin = np.zeros((24, 1)), np.zeros(24)
    begin[1] = 0.5
    fluid = FluidDirection(kernels, table, FluidLinks(cluster, 3), begin).run()
    assert fluid.message_end == pytest.approx([1.5, 2.0]) and fluid.end[[0, 1, 8, 16], 0] == pytest.approx([1.5, 2] * 2)
    steps, timed = simulate_direction(kernels, table, LinkQueues(cluster, 3), begin)
    assert timed["end"] == pytest.approx(fluid.message_end) and steps[:, :, 2] == pytest.approx(fluid.end)


@pytest.mark.parametrize(("cluster", "algorithm", "within"), [
    ("a800", "hybrid", 0.01),
    ("atlas350", "hybrid", 0.01),
    ("atlas350", "ulysses", 0.01),
    ("a800", "direct", 0.02),
    ("atlas350", "direct", 0.01),
    ("a2", "ring", 0.001),
])  # fmt: skip
@pytest.mark.parametrize("lengths", ["wikipedia", "prolong"])
def test_plans_take_as_long_as_with_fair_shares(cluster: str, algorithm: str, within: float, lengths: str) -> None:
    """16 ranks, without linear layers, which would hide a deviation."""
    preset = load_cluster(cluster).with_values(posting=0.0)
    topology = Topology(16 // preset.ranks_per_node, preset.ranks_per_node, cluster)
    documents = Documents(sample_batch(lengths, 16 * 4096, 1))
    plan = build_plan(documents, topology, AttentionConfig(32, 32, 128), algorithm)
    timeline = simulate_plan(plan, preset, LayerCost(0.0, 4096))
    assert ratio(timeline) == pytest.approx(1, abs=within)
    forward, _ = fluid_ends(timeline)
    assert np.abs(timeline.steps_forward[:, -1, 2] / forward[:, -1] - 1).mean() < within
