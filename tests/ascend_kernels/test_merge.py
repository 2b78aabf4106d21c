"""Partial results merged into accumulators: against the attention over all keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.ascend_kernels import merge_parts_, merge_statistics_
from mindspeed_cp.ops.attention.npu_statistics import Order, _places

NONE = float("-inf")
LARGEST = torch.finfo(torch.float32).max


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


@pytest.mark.parametrize(
    ("maximum", "total"),
    [(-LARGEST, LARGEST), (-LARGEST, 30.0), (NONE, 0.0), (1.0, 0.0)],
    ids=["invalid line", "average of the values", "nothing", "sum 0"],
)
def test_rows_that_saw_no_key_count_as_nothing(implementation, maximum, total) -> None:
    """As the operator says so; the first row of the first part, and the second of both."""
    generator = torch.Generator().manual_seed(1)
    out, lse = torch.full((3, 1, 8), float("nan")), torch.full((3, 1), NONE)
    parts = torch.randn(2, 3, 1, 8, generator=generator)
    maxima, sums = torch.ones(2, 3), torch.full((2, 3), 4.0)
    for part, row in ((0, 0), (0, 1), (1, 1)):
        maxima[part, row], sums[part, row] = maximum, total
        parts[part, row] = float("nan") if total == 0 else 7.0
    merge_statistics_(out, lse, parts, maxima, sums, times=1, implementation=implementation)
    each = 1.0 + torch.tensor(4.0).log()
    assert torch.equal(out[0], parts[1, 0]) and torch.allclose(lse[0], each)
    assert not out[1].any() and lse[1] == NONE
    assert torch.allclose(out[2], parts[:, 2].mean(0)) and torch.allclose(lse[2], each + torch.tensor(2.0).log())


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
        ({"part_lse": torch.zeros(1, 2, 4).mT}, r"part_lse is of strides \[8, 1, 4\]; valid: contiguous within a part"),
        ({"part_lse": torch.zeros(1, 4, 2).double()}, "part_lse's type is torch.float64; valid: torch.float32"),
        ({"part_lse": torch.zeros(1, 4, 2, device="meta")}, "part_lse is on meta; valid: on cpu, where the others are"),
        ({"parts": torch.zeros(1, 4, 2, 8).int()}, "parts's type is torch.int32; valid: a floating type"),
        ({"parts": torch.zeros(1, 4, 8, 2).mT}, "parts is of strides"),
        ({"lse": torch.zeros(2, 4).T}, r"lse is of strides \[1, 4\]; valid: contiguous"),
        ({"places": torch.arange(16, dtype=torch.int32)[::2]}, r"places is of strides \[2\]; valid: contiguous"),
        ({"places": torch.arange(7, dtype=torch.int32)}, r"places's shape is \[7\]; valid: \[8\]"),
        ({"places": torch.arange(8)}, "places's type is torch.int64; valid: torch.int32"),
        ({"sums": torch.zeros(1, 128)[:, ::2]}, r"sums is of strides \[128, 2\]; valid: contiguous"),
        ({"times": 0}, "times is 0; valid: 1 or more"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_what_kernels_would_misread_is_refused(implementation, change, message) -> None:
    given = dict(out=torch.zeros(4, 2, 8), lse=torch.zeros(4, 2), parts=torch.zeros(1, 4, 2, 8)) | change
    if {"places", "sums", "times"} & set(change):
        given = dict(maxima=torch.zeros(1, 64), sums=torch.zeros(1, 64)) | given
        with pytest.raises(ConfigError, match=message):
            merge_statistics_(**given, implementation=implementation)
        return
    given = dict(part_lse=torch.zeros(1, 4, 2)) | given
    with pytest.raises(ConfigError, match=message):
        merge_parts_(**given, implementation=implementation)


def test_what_does_not_go_together_is_refused() -> None:
    out, lse, part = torch.zeros(4, 2, 8), torch.zeros(4, 2), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ConfigError, match=r"out and lse is torch.bfloat16 and torch.float32; valid: fp32"):
        merge_parts_(out.bfloat16(), lse, part, torch.zeros(1, 4, 2))
    with pytest.raises(ConfigError, match=r"part_lse's shape is \[1, 2, 4\]; valid: \[1, 4, 2\]"):
        merge_parts_(out, lse, part, torch.zeros(1, 2, 4))
    with pytest.raises(ConfigError, match=r"maxima's shape is \[1, 8\]; valid: \[1, 64\]"):
        merge_statistics_(out, lse, part, torch.zeros(1, 8), torch.zeros(1, 64))
    with pytest.raises(ConfigError, match="implementation is 'cuda'; valid: triton, torch, or None"):
        merge_parts_(out, lse, part, torch.zeros(1, 4, 2), "cuda")
