"""Gradients of bf16 in fp16: scaled by a power of two, so that none is lost, and the same at every size."""

from __future__ import annotations

import pytest
import torch

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.engine import attend_in_process
from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention.npu.backend import NpuAttention, scale_gradient
from mindspeed_cp.plan import AttentionConfig, Topology
from tests.ops.npu_oracle import OracleOperator


def gradient(rows: int = 64, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(rows, 2, 16, generator=generator) * size).bfloat16()


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e9, 1e30])
def test_no_bit_changes_and_one_over_the_factor_takes_it_back(size: float) -> None:
    dout = gradient(size=size)
    scaled, inverse = scale_gradient(dout, 1)
    assert scaled.dtype == torch.float16 and inverse.dtype == torch.float32 and inverse.dim() == 0
    large = dout.abs() > 2.0**-12 * dout.abs().max()
    assert torch.equal((scaled.float() * inverse)[large], dout.float()[large]) and bool(large.float().mean() > 0.9)
    assert 2.0**5 <= float(scaled.abs().max()) < 2.0**6


@pytest.mark.parametrize(("rows", "group", "target"), [(1, 1, 8), (64, 1, 5), (64, 4, 4), (8192, 1, 1), (8192, 8, 0)])
def test_calls_of_many_rows_leave_room_for_sums(rows: int, group: int, target: int) -> None:
    scaled, _ = scale_gradient(gradient(rows), group)
    assert 2.0**target <= float(scaled.abs().max()) < 2.0 ** (target + 1)


def test_zeros_and_what_is_not_finite_stay_what_they_are() -> None:
    scaled, inverse = scale_gradient(torch.zeros(3, 1, 4, dtype=torch.bfloat16), 1)
    assert not scaled.any() and bool(inverse.isfinite())
    assert scale_gradient(torch.zeros(0, 1, 4, dtype=torch.bfloat16), 1)[0].shape == (0, 1, 4)
    for value in (float("inf"), float("nan")):
        dout = gradient()
        dout[3, 1, 2] = value
        scaled, inverse = scale_gradient(dout, 1)
        assert not (scaled.float() * inverse)[3, 1, 2].isfinite()


@pytest.mark.parametrize("size", [2.0**-60, 1.0, 2.0**40])
def test_gradients_of_attention_are_the_same_at_every_size(size: float) -> None:
    """Without the factor the smallest would be zeros, and the largest infinite."""
    attention, generator = AttentionConfig(4, 2, 16), torch.Generator().manual_seed(1)
    shapes = ((150, 4, 16), (150, 2, 16), (150, 2, 16), (150, 4, 16))
    q, k, v, dout = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    plan = build_plan(Documents([101, 49]), Topology(1, 3), attention, "ring")
    backend = NpuAttention(precision="fp16", operator=OracleOperator())
    results, scaled = (vars(attend_in_process(plan, q, k, v, x, backend)) for x in (dout, dout * size))
    assert torch.equal(results["out"], scaled["out"])
    for name in ("dq", "dk", "dv"):
        assert torch.equal(results[name].double() * size, scaled[name].double()), name
