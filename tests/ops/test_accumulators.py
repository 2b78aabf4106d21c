"""Sums of gradients and merged outputs are those of plain fp32 memory, whatever comes in which order and type."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, OutputAccumulator

ROWS, HEADS, DIM = 9, 3, 2
DTYPES = (torch.bfloat16, torch.float32)


def integers(seed: int, *shape: int) -> Tensor:
    """Small integers: their sums are exact in both types."""
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed)).float()


@st.composite
def rows(draw: st.DrawFn) -> slice | Tensor:
    if draw(st.integers(0, 3)) == 0:
        numbers = draw(st.lists(st.integers(0, ROWS - 1), max_size=ROWS, unique=True))
        return torch.tensor(numbers, dtype=torch.int64)
    start = draw(st.integers(0, ROWS))
    return slice(start, draw(st.integers(start, ROWS)))


STEP = st.tuples(
    st.sampled_from(["add", "add", "add", "clear", "rows", "result"]), rows(), st.sampled_from(DTYPES),
    st.sampled_from([slice(None), slice(0, HEADS), slice(1, 2)]),
)  # fmt: skip


@settings(max_examples=400)
@given(st.lists(STEP, max_size=8))
def test_sums_are_those_of_plain_memory(steps: list[tuple[str, slice | Tensor, torch.dtype, slice]]) -> None:
    total, wanted = GradientAccumulator(torch.zeros(ROWS, HEADS, DIM)), torch.zeros(ROWS, HEADS, DIM)
    for number, (what, chosen, dtype, heads) in enumerate(steps):
        if what == "add":
            part = integers(number, len(wanted[chosen]), len(range(HEADS)[heads]), DIM)
            wanted[chosen, heads] += part
            total.add(chosen, part.to(dtype), heads)
        elif what == "clear":
            wanted[chosen] = 0
            total.clear(chosen)
        elif what == "rows":
            got = total.rows(chosen, dtype)
            assert got.dtype == dtype and torch.equal(got.float(), wanted[chosen])
        else:
            got = total.result(dtype)
            assert got.dtype == dtype and got.is_contiguous() and torch.equal(got.float(), wanted)
    assert torch.equal(total.fp32(), wanted)


def test_the_gradient_of_one_call_is_kept_as_it_is() -> None:
    part = integers(0, ROWS, HEADS, DIM).bfloat16()
    total = GradientAccumulator(part)
    total.add(slice(0, ROWS), part)
    assert (
        total.result(torch.bfloat16) is part
        and total.rows(slice(2, 5), torch.bfloat16).data_ptr() == part[2:].data_ptr()
    )
    total.add(slice(0, 4), part[:4])
    assert total.result(torch.float32).dtype == torch.float32 and torch.equal(
        part, integers(0, ROWS, HEADS, DIM).bfloat16()
    )


def test_a_sum_is_rounded_once() -> None:
    """1 + 2 ** -8 is no number of bf16: added up there, a hundred parts of 2 ** -8 would be lost."""
    total = GradientAccumulator(torch.zeros(1, 1, 1, dtype=torch.bfloat16))
    for value in [1.0] + [2.0**-8] * 128:
        total.add(slice(0, 1), torch.full((1, 1, 1), value, dtype=torch.bfloat16))
    assert total.result(torch.bfloat16).item() == 1.5


def test_the_output_of_one_call_is_kept_as_it_is() -> None:
    q, out, lse = (
        torch.zeros(ROWS, HEADS, 4, dtype=torch.bfloat16),
        torch.ones(ROWS, HEADS, DIM).bfloat16(),
        torch.ones(ROWS, HEADS),
    )
    output = OutputAccumulator(q, DIM)
    output.store(slice(0, ROWS), slice(0, HEADS), out, lse)
    assert output.result(torch.bfloat16)[0] is out and output.result(torch.bfloat16)[1] is lse
    assert output.fp32()[0].dtype == torch.float32 and torch.equal(output.result(torch.bfloat16)[0], out)


def test_rows_without_a_result_are_zero_and_minus_infinity() -> None:
    q = torch.zeros(ROWS, HEADS, 4, dtype=torch.bfloat16)
    for stored in (slice(3, 7), torch.tensor([5, 1])):
        output = OutputAccumulator(q, DIM)
        rest = torch.ones(ROWS, dtype=torch.bool)
        rest[stored] = False
        count = ROWS - int(rest.sum())
        output.store(stored, slice(0, 2), torch.ones(count, 2, DIM).bfloat16(), torch.ones(count, 2))
        out, lse = output.result(torch.bfloat16)
        assert (out[stored, :2] == 1).all() and (lse[stored, :2] == 1).all()
        assert not out[rest].any() and not out[:, 2].any() and (lse[rest] == -torch.inf).all()
        assert (lse[:, 2] == -torch.inf).all()
    out, lse = OutputAccumulator(q, DIM).result(torch.bfloat16)
    assert not out.any() and (lse == -torch.inf).all() and out.dtype == torch.bfloat16
