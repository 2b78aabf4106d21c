"""The sums of gradients: equal up to rounding for every algorithm, and not without one rank's part."""

from __future__ import annotations

import pytest
import torch

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.cluster_check.gradient_sums import TOLERANCE, differences, gradient_sums, wrong_sums
from mindspeed_cp.engine import attend_in_process

TOKENS, RANKS = 600, 4


def run(
    algorithm: str, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Inputs, output, its gradient, and gradients of the inputs."""
    attention = AttentionConfig(4, 2, 32)
    plan = build_plan(Documents([401, 37, 162]), Topology(2, 2), attention, algorithm)
    generator = torch.Generator().manual_seed(3)
    shapes = [(TOKENS, heads, 32) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    result = attend_in_process(plan, q, k, v, dout)
    assert result.dq is not None and result.dk is not None and result.dv is not None
    return [q, k, v], result.out, dout, [result.dq, result.dk, result.dv]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("algorithm", ["ring", "ulysses", "direct"])
def test_rounding_is_far_below_what_is_allowed(algorithm: str, dtype: torch.dtype) -> None:
    totals = gradient_sums(*run(algorithm, dtype))
    assert max(differences(totals)) < TOLERANCE[dtype] / 4
    assert wrong_sums(totals, dtype) is None


@pytest.mark.parametrize("name, index", [("keys", 1), ("values", 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_lost_gradient_is_seen(name: str, index: int, dtype: torch.dtype) -> None:
    """An eighth of the rows gets nothing, as from a message that was lost."""
    inputs, out, dout, gradients = run("ring", dtype)
    gradients[index][: TOKENS // 8] = 0
    text = wrong_sums(gradient_sums(inputs, out, dout, gradients), dtype)
    assert text is not None and f"the gradients of all {name} are wrong in sum" in text


def test_nothing_and_not_a_number_are_told_apart() -> None:
    assert wrong_sums([0.0] * 8, torch.float32) is None
    assert wrong_sums([float("nan")] * 8, torch.float32) is not None
