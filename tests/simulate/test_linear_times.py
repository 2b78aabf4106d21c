"""Linear layers around attention, where hidden states move to its layout and back; elements of 2 and 4 bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, simulate_plan
from mindspeed_cp.algorithms.hierarchical import plan_from_placement
from mindspeed_cp.algorithms.linear_layout import cheapest_mode, with_linear_layout
from mindspeed_cp.algorithms.placement.estimate import PlacementModel
from mindspeed_cp.algorithms.placement.placer import DocumentPlacer
from mindspeed_cp.algorithms.placement.policy import PlacementPolicy
from mindspeed_cp.cluster import ComputeCost, LayerCost, load_cluster
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.plan.transfers import HIDDEN_STATES, KEYS, REDISTRIBUTION, edge_steps, transfers
from mindspeed_cp.simulate.simulator import linear_times

MHA = AttentionConfig(heads=32, head_dim=128)
LAYER = LayerCost.for_attention(MHA)
CLUSTER = load_cluster("a2").with_values(posting=0.0)


def test_projections_are_those_of_attentions_rows_and_the_rest_of_the_linear_layouts() -> None:
    """One document on each of two ranks, so that only hidden states travel."""
    alone = build_plan(Documents([3000, 2900]), Topology(1, 2), MHA, "hierarchical", remap="off")
    assert sorted(alone.layout.token_counts.tolist()) == [2900, 3000]
    plan = with_linear_layout(alone, "hidden")
    cluster, most = CLUSTER.with_ranks(2), int(plan.layout.token_counts.argmax())
    made, cost = simulate_plan(plan, cluster), ComputeCost(cluster, MHA)
    rate = cluster.peak_flops * cluster.linear_efficiency
    qkv, out, ffn = 2 * 4096 * 3 * 4096, 2 * 4096 * 4096, 2 * 3 * 4096 * 10923
    linear = 3 * ((qkv + out) * plan.layout.token_counts + ffn * 2950) / rate
    assert made.linear == pytest.approx(linear)
    row = 50 * 4096 * 2 / cluster.effective_pair + cluster.in_node_latency
    kernels = sum(float(cost.attention_seconds(3000 * 3001 / 2, 3000, 1, backward)) for backward in (False, True))
    assert made.compute[most] == pytest.approx(kernels, rel=0.05)  # tiles of a causal document are cut
    assert made.total == pytest.approx(made.compute[most] + linear[most] + 4 * row)
    assert made.exposed[most] == pytest.approx(4 * row)
    off = simulate_plan(alone, cluster)
    assert off.linear == pytest.approx(3 * (qkv + out + ffn) * alone.layout.token_counts / rate)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_moved_to_split_heads_leaves_after_hidden_states_have_come(direction: str) -> None:
    documents = Documents([20000, *[900] * 30])
    topology = Topology(2, 4, "a2")
    model = PlacementModel(documents, documents, topology, MHA, cluster_of(topology), LAYER, True)
    placement = DocumentPlacer(model, with_linear=False).place(PlacementPolicy(0.5, 0.12, remap=True))
    plan = with_linear_layout(plan_from_placement(placement, documents, documents, topology, MHA), "hidden")
    assert plan.linear_layout is not None and any(
        part_plan.q_redistribution is not None for part_plan in plan.parts_or_self
    )
    made = simulate_plan(plan, CLUSTER.with_ranks(4))
    turns = made.steps_forward if direction == "forward" else made.steps_backward
    sent = made.transfers_forward if direction == "forward" else made.transfers_backward
    first = edge_steps(plan)
    there = sent[(sent["kind"] == HIDDEN_STATES) & (sent["start"] == 0)]
    moves = sent[(sent["kind"] == REDISTRIBUTION) & (sent["start"] == first - 1)]
    assert len(there) and len(moves)
    came = np.zeros(8)
    for end in ("src", "dst"):
        np.maximum.at(came, there[end], there["end"])
    linear = linear_times(plan, ComputeCost(made.cluster, MHA), direction == "backward")
    for end in ("src", "dst"):
        assert (moves["begin"] >= came[moves[end]] + linear.before[moves[end]] * (1 - 1e-9)).all()
    back = sent[(sent["kind"] == HIDDEN_STATES) & (sent["start"] > 0)]
    others = sent[sent["kind"] == REDISTRIBUTION]
    for rank in range(8):
        own_messages = back[(back["src"] == rank) | (back["dst"] == rank)]
        before = others[(others["src"] == rank) | (others["dst"] == rank)]
        if len(own_messages) and len(before):
            assert own_messages["begin"].min() >= before["end"].max() + linear.after[rank] * (1 - 1e-9)
    assert made.total == pytest.approx(float(made.steps_backward[:, -1, 2].max()))
    own = made.is_attention(direction)
    assert own.sum() == len(plan.step_order(direction)) + 4 and len(own) == turns.shape[1]  # 4 in which ranks only post
    assert (turns[:, own, 1] - turns[:, own, 0]).sum() < made.compute.sum()
    both = made.steps_forward[:, made.is_attention("forward")], made.steps_backward[:, made.is_attention("backward")]
    assert sum((x[:, :, 1] - x[:, :, 0]).sum(1) for x in both) == pytest.approx(made.compute)
    assert made.linear.sum() == pytest.approx(3 * documents.tokens * LAYER.flops_per_token / _rate())


def _rate() -> float:
    return CLUSTER.peak_flops * CLUSTER.linear_efficiency


def test_fp32_doubles_what_is_not_fp32_anyway() -> None:
    plan = build_plan(Documents([3000, 500]), Topology(1, 4), MHA)
    for direction in ("forward", "backward"):
        two, four = (transfers(plan, direction, size) for size in (2, 4))
        keys = two["kind"] == KEYS
        assert (four["bytes"][keys] == 2 * two["bytes"][keys]).all()
        assert (four["bytes"][~keys] == two["bytes"][~keys]).all() and (~keys).any() == (direction == "backward")
    slow, fast = (simulate_plan(plan, CLUSTER, replace(LAYER, bytes_per_element=size)) for size in (4, 2))
    assert slow.total > fast.total and (slow.memory > fast.memory).all()


def test_tensor_parallel_ranks_share_rows_with_sequence_parallelism() -> None:
    attention = AttentionConfig(heads=16, kv_heads=2, head_dim=128)  # of one of two ranks
    widths = (4096, 11008, 32, 4, 128, 128)
    documents, topology = Documents([20000, *[900] * 30]), Topology(2, 4, "a2")
    moved, modes = [], []
    for shared in (False, True):
        layer = LayerCost.from_sizes(*widths, tensor_parallel=2, sequence_parallel=shared)
        plan = with_linear_layout(
            build_plan(documents, topology, attention, "hierarchical", remap="off", head_split=False), "hidden"
        )
        table = transfers(plan, "forward", layer.bytes_per_element, layer.hidden_row_bytes)
        moved.append(table["bytes"][table["kind"] == HIDDEN_STATES].sum())
        modes.append(cheapest_mode(plan, 4096, 2, sequence_parallel=shared))
    assert moved[0] == 2 * moved[1] > 0
    # whole hidden states are wider than half of the heads; half of their rows are not
    assert modes == ["qkv", "hidden"]
