"""Rows packed and unpacked by runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import ConfigError
from mindspeed_cp.ascend_kernels import Runs, gather_spans, scatter_spans
from tests.ascend_kernels.has import triton_runs

IMPLEMENTATIONS = ["torch", *(["triton"] if triton_runs() else [])]
SHAPES = [(3, 16), (2, 40), (1, 5)]


def tensors(rows: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, *shape, generator=generator).to(dtype) for shape in SHAPES[:count]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_go_where_the_runs_say(implementation, count, dtype) -> None:
    runs = Runs.of([40, 0, 7, 9], [0, 50, 17, 30], [17, 3, 0, 20])
    sources = tensors(60, count, dtype)
    targets = [torch.full_like(x, 9.0) for x in sources]
    gather_spans(sources, targets, runs, implementation)
    for x, y in zip(sources, targets, strict=True):
        assert torch.equal(y[:17], x[40:57]) and torch.equal(y[50:53], x[:3]) and torch.equal(y[30:50], x[9:29])
        assert (y[17:30] == 9).all() and (y[53:] == 9).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=8),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_there_and_back(name, pieces, add, rng) -> None:
    """What was gathered scatters to where it was; added, it doubles."""
    counts = np.array([count for count, _ in pieces], np.int64)
    gaps = np.array([gap for _, gap in pieces], np.int64)
    source = np.cumsum(counts + gaps) - counts
    order = list(range(len(pieces)))
    rng.shuffle(order)
    target = np.zeros(len(pieces), np.int64)
    target[order] = np.cumsum(counts[order]) - counts[order]
    runs = Runs.of(source, target, counts)
    rows = int(counts.sum())
    sources = tensors(int((counts + gaps).sum()) + 1, 3, torch.float32)
    packed = [torch.zeros(rows, *x.shape[1:]) for x in sources]
    gather_spans(sources, packed, runs, name)
    back = [x.clone() if add else torch.zeros_like(x) for x in sources]
    scatter_spans(packed, back, runs, add, name)
    named = torch.zeros(len(sources[0]), dtype=torch.bool)
    named[runs.source] = True
    for x, y in zip(sources, back, strict=True):
        assert torch.equal(y[named], x[named] * (2 if add else 1)) and torch.equal(
            y[~named], x[~named] if add else y[~named] * 0
        )


def test_sums_are_made_in_fp32_and_rounded_once(implementation) -> None:
    runs = Runs.of([0], [2], [3])
    target, source = torch.full((4, 8), 256.0, dtype=torch.bfloat16), torch.full((6, 8), 0.75)
    scatter_spans([source], [target], runs, add=True, implementation=implementation)
    assert (target[:3] == torch.tensor(256.75).bfloat16()).all() and (target[3:] == 256).all()


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="a target row is in two runs; valid: runs whose targets lie apart"):
        Runs.of([0, 5], [0, 2], [3, 3])
    with pytest.raises(ConfigError, match="a row or count is negative"):
        Runs.of([-1], [0], [3])
    runs, x = Runs.of([0], [0], [2]), torch.zeros(4, 8)
    with pytest.raises(ConfigError, match=r"the number of tensors is \(4, 4\); valid: 1 to 3 pairs"):
        gather_spans([x] * 4, [x] * 4, runs)
    with pytest.raises(ConfigError, match=r"a row's shape is \[8\] and \[7\]; valid: equal"):
        gather_spans([x], [torch.zeros(4, 7)], runs)
    with pytest.raises(ConfigError, match="a tensor to read's number of rows is 1; valid: 2 or more"):
        gather_spans([x[:1]], [x], runs)
    with pytest.raises(ConfigError, match="a tensor to write's number of rows is 1; valid: 2 or more"):
        gather_spans([x], [x[:1]], runs)
    with pytest.raises(ConfigError, match="a tensor to write is on meta; valid: on cpu"):
        gather_spans([x], [x.to("meta")], runs)
    with pytest.raises(ConfigError, match="the runs is on meta; valid: on cpu"):
        gather_spans([x], [x], Runs.of([0], [0], [2], "meta"))
    with pytest.raises(ConfigError, match=r"a tensor to read is of strides \[1, 4\]; valid: contiguous"):
        gather_spans([torch.zeros(8, 4).T], [x], runs)


@pytest.mark.parametrize("widths", [(16, 0, 5), (0, 300, 7), (0, 0, 3), (4, 0, 0), (0, 0, 0)])
def test_tensors_without_channels_stop_no_other(implementation, widths) -> None:
    runs = Runs.of([1], [0], [20])
    sources = [torch.randn(21, width) for width in widths]
    targets = [torch.zeros(20, width) for width in widths]
    gather_spans(sources, targets, runs, implementation)
    for x, y in zip(sources, targets, strict=True):
        assert torch.equal(x[1:], y)


@pytest.mark.parametrize("add", [False, True])
def test_rows_gathered_twice_are_not_scattered(implementation, add) -> None:
    """What the row would get depends on which comes last, and with `add` one of both may be lost."""
    runs, x, y = Runs.of([0, 1], [0, 2], [2, 2]), torch.ones(3, 4), torch.zeros(4, 4)
    gather_spans([x], [y], runs, implementation)
    assert (y == 1).all()
    with pytest.raises(
        ConfigError, match="a source row is in two runs; valid: to scatter: runs whose sources lie apart"
    ):
        scatter_spans([y], [x], runs, add, implementation)
