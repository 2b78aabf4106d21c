"""Partial results merged into accumulators: against the attention over all keys."""

from __future__ import annotations

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.ascend_kernels import merge_parts_

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


def test_heads_without_channels_have_statistics_all_the_same(implementation) -> None:
    lse, part_lse = torch.zeros(3, 2), torch.zeros(1, 3, 2)
    merge_parts_(torch.zeros(3, 2, 0), lse, torch.zeros(1, 3, 2, 0), part_lse, implementation)
    assert torch.allclose(lse, torch.full((3, 2), 2.0).log())


def test_parts_may_lie_apart(implementation) -> None:
    """Contiguous within a part, and not from part to part."""
    scores, values, out, lse = problem(4, 9, 2, 16, torch.float32)
    total, total_lse = torch.zeros(9, 2, 16), torch.full((9, 2), NONE)
    merge_parts_(total, total_lse, out[::2], lse[::2], implementation)
    whole, whole_lse = expected(scores[::2], values[::2])
    assert torch.allclose(total.double(), whole, atol=2e-6) and torch.allclose(total_lse.double(), whole_lse, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part_lse": torch.zeros(1, 2, 4).mT}, r"part_lse is of strides \[8, 1, 4\] on cpu; valid: contiguous"),
        ({"part_lse": torch.zeros(1, 4, 2, device="meta")}, "part_lse is .* on meta; valid: contiguous, on cpu, where"),
        ({"parts": torch.zeros(1, 4, 8, 2).mT}, "parts is of strides"),
        ({"lse": torch.zeros(2, 4).T}, r"lse is of strides \[1, 4\]"),
        ({"implementation": "cuda"}, "implementation is 'cuda'; valid: triton, torch, or None"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_memory_that_kernels_would_misread_is_refused(implementation, change, message) -> None:
    given = dict(out=torch.zeros(4, 2, 8), lse=torch.zeros(4, 2), parts=torch.zeros(1, 4, 2, 8))
    given |= dict(part_lse=torch.zeros(1, 4, 2), implementation=implementation)
    with pytest.raises(ConfigError, match=message):
        merge_parts_(**given | change)
