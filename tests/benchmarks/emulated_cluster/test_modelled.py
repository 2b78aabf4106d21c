"""The backend that takes the modelled time of kernels."""

import pytest
import torch

from benchmarks.cluster.layer import ModelledAttention
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, context_parallel_attention
from mindspeed_cp.cluster import ComputeCost, load_cluster
from mindspeed_cp.ops.attention import ForwardState, Heads, OutputAccumulator

REAL, WIRE = AttentionConfig(8, 4, 128), AttentionConfig(8, 4, 4)
COST = ComputeCost(load_cluster("a800"), REAL)


def model(factor: float = 10.0) -> tuple[ModelledAttention, list[float]]:
    naps: list[float] = []
    return ModelledAttention(COST, factor, naps.append), naps


def test_a_document_on_one_rank_takes_its_modelled_time_forward_and_backward():
    backend, naps = model()
    n = 512
    plan = build_plan(Documents([n]), Topology(), WIRE)
    q, k, v = (torch.randn(n, heads, 4).requires_grad_() for heads in (8, 4, 4))
    out = context_parallel_attention(q, k, v, plan, backend=backend)
    forward = sum(naps)
    assert forward == pytest.approx(10 * float(COST.attention_seconds(n * (n + 1) / 2, n, 1)))
    out.backward(torch.ones_like(out))
    backward = sum(naps) - forward
    assert backward == pytest.approx(
        10 * float(COST.attention_seconds(n * (n + 1) / 2, n, len(naps) - 1, backward=True)), rel=0.2
    )
    assert backend.slept == pytest.approx(sum(naps))


@pytest.mark.parametrize("algorithm, options", [("ring", {}), ("direct", {"layout": "balanced"}), ("all_gather", {})])
def test_no_pair_is_forgotten(algorithm, options):
    no_overhead = COST.cluster.with_values(tile_rows=0.0, launch=0.0)
    backend = ModelledAttention(ComputeCost(no_overhead, REAL), 1.0, lambda _: None)
    lengths = [700, 31, 256, 37]
    plan = build_plan(Documents(lengths), Topology(2, 2), WIRE, algorithm, **options)
    total = 0.0
    for rank in range(4):
        lowered = backend.lower_forward(
            plan.forward.tiles(rank), int(plan.q_layout_compute.token_counts[rank]), WIRE, torch.bfloat16
        )
        total += sum(work.math for calls in lowered.values() for work in calls)
        assert all(work.launch == 0 for calls in lowered.values() for work in calls)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    assert total == pytest.approx(float(ComputeCost(no_overhead, REAL).attention_seconds(pairs, 1)))


def test_a_share_of_the_heads_takes_a_share_of_the_math_and_all_of_the_launches():
    backend, naps = model()
    plan = build_plan(Documents([64]), Topology(), WIRE)
    (calls,) = backend.lower_forward(plan.forward.tiles(0), 64, WIRE, torch.bfloat16).values()
    x = torch.zeros(1)
    for heads in (Heads.all(WIRE), Heads((0, 2), (0, 1))):
        backend.forward(calls, WIRE, ForwardState(x, OutputAccumulator(x[:, None, None], 1), heads), x, x)
    (work,) = calls
    assert naps == [pytest.approx(work.math + work.launch), pytest.approx(work.math / 4 + work.launch)]
    assert work.launch == pytest.approx(10 * COST.cluster.launch)


def test_short_tiles_take_longer_for_a_pair():
    backend, _ = model()

    def seconds(lengths: list[int]) -> float:
        plan = build_plan(Documents(lengths), Topology(), WIRE)
        (calls,) = backend.lower_forward(plan.forward.tiles(0), sum(lengths), WIRE, torch.bfloat16).values()
        return calls[0].math / sum(n * (n + 1) / 2 for n in lengths)

    assert seconds([64] * 16) > 2 * seconds([1024])
