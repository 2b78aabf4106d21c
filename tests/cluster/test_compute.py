"""Seconds of kernels: they grow with the work, shrink with longer tiles, and come in arrays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.cluster import ComputeCost, LayerCost, cluster_names, load_cluster
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig

A2 = load_cluster("a2")
COST = ComputeCost(A2, AttentionConfig(32, 8, 128))
whole = st.integers(1, 10**9)


def test_a_long_tile_reaches_the_efficiency_of_the_preset() -> None:
    pairs, rows = 1e12, 1e9
    flops = 2 * pairs * 32 * (128 + 128)
    assert COST.attention_seconds(pairs, rows) == pytest.approx(
        flops / (A2.peak_flops * A2.attention_efficiency), rel=1e-5
    )
    assert COST.attention_seconds(pairs, A2.tile_rows) == pytest.approx(
        2 * COST.attention_seconds(pairs, rows), rel=1e-5
    )


def test_values_may_be_of_another_width() -> None:
    wide = ComputeCost(A2, AttentionConfig(32, 8, 192, 128))
    assert wide.attention_seconds(1000, 10) == pytest.approx(COST.attention_seconds(1000, 10) * 320 / 256)


@given(pairs=whole, more=whole, rows=st.integers(1, 10**6), longer=st.integers(1, 10**6), calls=st.integers(0, 100))
def test_more_work_takes_longer_and_longer_tiles_take_less(
    pairs: int, more: int, rows: int, longer: int, calls: int
) -> None:
    seconds = COST.attention_seconds(pairs, rows, calls)
    assert COST.attention_seconds(pairs + more, rows, calls) > seconds
    assert COST.attention_seconds(pairs, rows + longer, calls) < seconds
    assert COST.attention_seconds(pairs, rows, calls + 1) - seconds == pytest.approx(A2.launch)
    assert COST.linear_layer_seconds(pairs + more) > COST.linear_layer_seconds(pairs) > 0


@pytest.mark.parametrize("name", cluster_names())
def test_the_backward_is_two_and_a_half_times_the_forward(name: str) -> None:
    cost = ComputeCost(load_cluster(name), AttentionConfig(8))
    assert cost.attention_seconds(10**7, 100, backward=True) == pytest.approx(2.5 * cost.attention_seconds(10**7, 100))
    assert cost.linear_layer_seconds(10**3, backward=True) == pytest.approx(2 * cost.linear_layer_seconds(10**3))
    launches = cost.attention_seconds(10**7, 100, 3, backward=True) - cost.attention_seconds(10**7, 100, backward=True)
    assert launches == pytest.approx(3 * load_cluster(name).launch), "a call costs as much in the backward"


def test_a_layer_counts_its_weights() -> None:
    layer = LayerCost.from_sizes(4096, 14336, heads=32, kv_heads=8, head_dim=128, head_dim_v=128)  # LLaMA 3 8B
    assert layer.flops_per_token / 2 == 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert LayerCost.from_sizes(64, 256, 4, 4, 16, 16, gated=False).flops_per_token == 2 * (4 * 64 * 64 + 2 * 64 * 256)
    half = LayerCost.from_sizes(4096, 14336, 32, 8, 128, 128, tensor_parallel=2)
    assert half.flops_per_token == layer.flops_per_token / 2 and half.hidden_size == 4096


def test_a_layer_like_an_attention_is_the_same_for_any_tensor_parallel_size() -> None:
    layer = LayerCost.for_attention(AttentionConfig(32, 8, 128))
    assert layer.hidden_size == 4096 and layer == LayerCost.from_sizes(4096, 10923, 32, 8, 128, 128)
    part = LayerCost.for_attention(AttentionConfig(8, 2, 128), tensor_parallel=4)
    assert part.hidden_size == 4096 and part.flops_per_token == layer.flops_per_token / 4
    assert ComputeCost(A2, AttentionConfig(32, 8, 128)).layer == layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerCost.from_sizes(4096, 14336, 32, 0, 128, 128), "kv_heads is 0; valid: a whole number, 1 or more"),
        (lambda: LayerCost.from_sizes(4096, -1, 32, 8, 128, 128), "ffn_hidden_size is -1; valid: a whole number, 0 or more"),
        (lambda: LayerCost(float("nan"), 8), "flops_per_token is nan"),
        (lambda: LayerCost(1.0, 2.5), "hidden_size is 2.5"),  # type: ignore[arg-type]
        (lambda: LayerCost(10.0, 8, qkv_flops=-1.0), "LayerCost.qkv_flops is -1.0"),
        (lambda: LayerCost(10.0, 8, 6.0, 5.0), r"qkv_flops \+ out_flops is 11.0; valid: at most flops_per_token = 10.0"),
        (lambda: LayerCost(10.0, 8, hidden_row_shares=0), "hidden_row_shares is 0"),
        (lambda: LayerCost(10.0, 8, bytes_per_element=3), r"bytes_per_element is 3; valid: 2 \(bf16\), 4 \(fp32\)"),
    ],
)  # fmt: skip
def test_the_error_of_a_bad_layer_cost_has_the_argument(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
