"""Parts merged into outputs, and added to gradients: against the attention over all keys, and plain sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindspeed_cp import ConfigError
from mindspeed_cp.ascend_kernels.merge import MAX_PARTS, merge_parts, sum_parts

NONE = float("-inf")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def problem(parts: int, rows: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
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


def expected(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    every = scores.permute(1, 2, 0, 3).flatten(2)
    lse = every.logsumexp(-1)
    weights = (every - lse.clamp(min=-1e30).unsqueeze(-1)).exp()
    return torch.einsum("rhk,hkd->rhd", weights, values.permute(1, 0, 2, 3).flatten(1, 2)), lse


def some_rows(parts: int, rows: int, where: str) -> tuple[list[Tensor], list[Tensor | None], list[int]]:
    """The rows of each part, and how they are named: all, a run, or by a table, in any order."""
    generator = torch.Generator().manual_seed(parts)
    numbers, tables, firsts = [], [], []
    for part in range(parts):
        first, stop = (0, rows) if where == "all" else (rows * part // 7, max(rows - part, 0))
        chosen = torch.arange(first, stop)
        table = None
        if where == "table":
            chosen = chosen[torch.randperm(len(chosen), generator=generator)]
            table = torch.full((rows,), -1, dtype=torch.int32)
            table[chosen] = torch.arange(len(chosen), dtype=torch.int32)
        numbers.append(chosen)
        tables.append(table)
        firsts.append(0 if where == "table" else first)
    return numbers, tables, firsts


@pytest.mark.parametrize("where", ["all", "run", "table"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("parts", "rows", "heads", "dim"), [(1, 40, 2, 16), (3, 77, 3, 40), (5, 9, 1, 128), (2, 0, 2, 8)]
)
def test_parts_make_the_whole(implementation, parts, rows, heads, dim, dtype, where) -> None:
    """The first part alone, then the others into what is there; the last launch rounds to the parts' type."""
    scores, values, out, lse = problem(parts, rows, heads, dim, dtype)
    numbers, tables, firsts = some_rows(parts, rows, where)
    for part, chosen in enumerate(numbers):
        missing = torch.ones(rows, dtype=torch.bool)
        missing[chosen] = False
        scores[part, missing] = NONE
    pieces, lses = ([x[part, chosen] for part, chosen in enumerate(numbers)] for x in (out, lse))
    total = torch.full((rows, heads, dim), float("nan")), torch.full((rows, heads), float("nan"))
    merge_parts(None, pieces[:1], lses[:1], tables[:1], firsts[:1], total, implementation)
    if parts > 1:
        rounded = torch.empty(rows, heads, dim, dtype=dtype), total[1]
        merge_parts(total, pieces[1:], lses[1:], tables[1:], firsts[1:], rounded, implementation)
        total = rounded
    whole, whole_lse = expected(scores, values)
    assert torch.allclose(total[0].double(), whole, atol=TOLERANCE[dtype], rtol=4e-3 if dtype != torch.float32 else 0)
    assert torch.allclose(total[1].double(), whole_lse, atol=2e-6)
    if rows:
        assert not total[0][3].any() and (total[1][3] == NONE).all()


@pytest.mark.parametrize("where", ["all", "run", "table"])
@pytest.mark.parametrize("has_total", [False, True])
def test_sums_are_exact_and_rounded_once(implementation, where, has_total) -> None:
    """Small integers and 2 ** -8, which a sum in bf16 would lose. Triton's interpreter truncates to bf16, devices do not."""
    rows, heads, dim = 23, 2, 12
    numbers, tables, firsts = some_rows(MAX_PARTS, rows, where)
    generator = torch.Generator().manual_seed(5)
    pieces = [
        torch.randint(-4, 4, (len(chosen), heads, dim), generator=generator).bfloat16() + 2**-8 * (part == 1)
        for part, chosen in enumerate(numbers)
    ]
    pieces = [piece.bfloat16() for piece in pieces]
    total = torch.full((rows, heads, dim), 0.5) if has_total else None
    wanted = torch.zeros(rows, heads, dim) if total is None else total.clone()
    for chosen, piece in zip(numbers, pieces, strict=True):
        wanted[chosen] += piece.float()
    for result in (torch.empty(rows, heads, dim), torch.empty(rows, heads, dim).bfloat16(), total):
        if result is not None:  # the last one in place
            sum_parts(total, pieces, tables, firsts, result, implementation)
            ulp = 2**-7 if implementation == "triton" and result.dtype == torch.bfloat16 else 0.0  # it truncates here
            assert torch.allclose(result.float(), wanted.to(result.dtype).float(), atol=0, rtol=ulp)


def test_heads_without_channels_have_statistics_all_the_same(implementation) -> None:
    total = torch.zeros(3, 2, 0), torch.zeros(3, 2)
    merge_parts(total, [torch.zeros(3, 2, 0)], [torch.zeros(3, 2)], [None], [0], total, implementation)
    assert torch.allclose(total[1], torch.full((3, 2), 2.0).log())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part_lse": [torch.zeros(2, 4).mT]}, r"part_lse\[0\] is of strides \[1, 4\] on cpu; valid: contiguous"),
        ({"part_lse": [torch.zeros(4, 2, device="meta")]}, r"part_lse\[0\] is .* on meta; valid: contiguous, on cpu, where"),
        ({"parts": [torch.zeros(4, 8, 2).mT]}, r"part\[0\] is of strides"),
        ({"result": (torch.zeros(4, 2, 8), torch.zeros(2, 4).T)}, r"result\[1\] is of strides \[1, 4\]"),
        ({"implementation": "cuda"}, "implementation is 'cuda'; valid: triton, torch, or None"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)  # fmt: skip
def test_memory_that_kernels_would_misread_is_refused(implementation, change, message) -> None:
    given = dict(
        total=None, parts=[torch.zeros(4, 2, 8)], part_lse=[torch.zeros(4, 2)], tables=[None], firsts=[0],
        result=(torch.zeros(4, 2, 8), torch.zeros(4, 2)), implementation=implementation,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        merge_parts(**given | change)
