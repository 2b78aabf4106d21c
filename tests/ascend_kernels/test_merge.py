"""Partial results merged into accumulators: against the attention over all keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.ascend_kernels import merge_parts_, merge_statistics_
from mindspeed_cp.ops.attention.npu_statistics import Order, _places

NONE = float("-inf")


def problem(parts: int, rows: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Scores [parts, rows, heads, 30], -inf where a row sees nothing of a part, values, partial outputs and lse."""
    generator = torch.Generator().manual_seed(rows + dim)
    scores = torch.randn(parts, rows, heads, 30, generator=generator, dtype=torch.float64) * 3
    for part in range(parts):
        scores[part, part::5] = NONE
    scores[:, 3:4] = NONE
    values = torch.randn(parts, heads, 30, dim, generator=generator, dtype=torch.float64)
    lse = scores.logsumexp(-1)
    out = torch.einsum("prhk,phkd->prhd", (scores - lse.clamp(min=-1e30).unsqueeze(-1)).exp(), values)
    out[lse == NONE] = float("nan")  # whatever stands there counts as nothing
    return scores, values, out.to(dtype).contiguous(), lse.float().contiguous()


def expected(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    every = scores.permute(1, 2, 0, 3).flatten(2)
    lse = every.logsumexp(-1)
    weights = (every - lse.clamp(min=-1e30).unsqueeze(-1)).exp()
    return torch.einsum("rhk,hkd->rhd", weights, values.permute(1, 0, 2, 3).flatten(1, 2)), lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("parts", "rows", "heads", "dim"), [(1, 40, 2, 16), (3, 77, 3, 40), (5, 7, 1, 128), (2, 0, 2, 8)]
)
def test_parts_make_the_whole(implementation, parts, rows, heads, dim, dtype) -> None:
    scores, values, out, lse = problem(parts, rows, heads, dim, dtype)
    total, total_lse = torch.full((rows, heads, dim), float("nan")), torch.full((rows, heads), NONE)
    merge_parts_(total, total_lse, out[:1], lse[:1], implementation)
    merge_parts_(total, total_lse, out[1:], lse[1:], implementation)
    whole, whole_lse = expected(scores, values)
    assert torch.allclose(
        total.double(), whole, atol={torch.float32: 2e-6, torch.float16: 4e-3}.get(dtype, 3e-2), rtol=0
    )
    assert torch.allclose(total_lse.double(), whole_lse, atol=2e-6)
    if rows:
        assert not total[3].any() and (total_lse[3] == NONE).all()


@pytest.mark.parametrize("lengths", [[30], [3, 20, 1, 16], list(range(1, 12))])
@pytest.mark.parametrize("ordered", [True, False], ids=["operator's order", "order of rows"])
def test_statistics_of_the_npus_operator_do_as_well(implementation, lengths, ordered) -> None:
    rows, heads, dim, parts = sum(lengths), 3, 24, 2
    scores, values, out, _ = problem(parts, rows, heads, dim, torch.float32)
    maxima = scores.amax(-1).float()
    sums = (scores - maxima.clamp(min=-1e30).double().unsqueeze(-1)).exp().sum(-1).float()
    order = Order(np.cumsum(lengths).tolist(), heads, torch.device("cpu"))
    places = torch.from_numpy(_places(np.array(lengths), heads)) if ordered else None
    given = [
        torch.stack([(order.write(x) if ordered else x.unsqueeze(-1).expand(-1, -1, 8)).reshape(-1) for x in statistic])
        for statistic in (maxima, sums)
    ]
    total, lse = torch.zeros(rows, heads, dim), torch.full((rows, heads), NONE)
    merge_statistics_(
        total, lse, out, given[0].contiguous(), given[1].contiguous(), places, implementation=implementation
    )
    whole, whole_lse = expected(scores, values)
    assert torch.allclose(total.double(), whole, atol=2e-6) and torch.allclose(lse.double(), whole_lse, atol=2e-6)


def test_what_does_not_go_together_is_refused() -> None:
    out, lse, part = torch.zeros(4, 2, 8), torch.zeros(4, 2), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ConfigError, match=r"out and lse is torch.bfloat16 and torch.float32; valid: fp32"):
        merge_parts_(out.bfloat16(), lse, part, torch.zeros(1, 4, 2))
    with pytest.raises(ConfigError, match=r"part_lse's shape is \[1, 2, 4\]; valid: \[1, 4, 2\]"):
        merge_parts_(out, lse, part, torch.zeros(1, 2, 4))
    with pytest.raises(ConfigError, match=r"maxima is torch.float32 \[1, 8\]; valid: fp32 \[1, 64\]"):
        merge_statistics_(out, lse, part, torch.zeros(1, 8), torch.zeros(1, 64))
    with pytest.raises(ConfigError, match="implementation is 'cuda'; valid: triton, torch, or None"):
        merge_parts_(out, lse, part, torch.zeros(1, 4, 2), "cuda")
