"""The online-softmax merge."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp.ops.attention.accumulators import merge_

INF = float("inf")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 999))
def test_merging_parts_gives_the_whole(parts, seed):
    g = torch.Generator().manual_seed(seed)
    scores, values = (
        [torch.randn(4, 2, n, generator=g) * 5 for n in parts],
        [torch.randn(n, 3, generator=g) for n in parts],
    )
    out, lse = torch.zeros(4, 2, 3), torch.full((4, 2), -INF)
    for s, v in zip(scores, values, strict=True):
        merge_(out, lse, (s.softmax(-1) @ v) if len(v) else torch.zeros(4, 2, 3), s.logsumexp(-1))
    s, v = torch.cat(scores, -1).double(), torch.cat(values).double()
    if len(v):
        assert torch.allclose(out.double(), s.softmax(-1) @ v, atol=1e-5) and torch.allclose(
            lse.double(), s.logsumexp(-1), atol=1e-5
        )
    else:
        assert (out == 0).all() and (lse == -INF).all()


def test_rows_without_keys_stay_exact_on_either_side():
    part = torch.tensor([[[2.0]], [[2.0]], [[0.0]], [[0.0]]])
    out = torch.tensor([[[1.0]], [[0.0]], [[1.0]], [[0.0]]])
    lse, part_lse = torch.tensor([[0.0], [-INF], [0.0], [-INF]]), torch.tensor([[0.0], [3.0], [-INF], [-INF]])
    merge_(out, lse, part, part_lse)
    assert torch.equal(out.flatten(), torch.tensor([1.5, 2.0, 1.0, 0.0]))
    assert (
        torch.allclose(
            lse.flatten()[:3], torch.tensor([2.0, 1.0, 1.0]).log() + torch.tensor([0.0, 3.0, 0.0]), atol=1e-7
        )
        and lse[3] == -INF
    )


def test_statistics_far_apart_do_not_overflow():
    out, lse = torch.ones(2, 1, 1), torch.tensor([[1e4], [-1e4]])
    merge_(out, lse, torch.full((2, 1, 1), 3.0), torch.tensor([[-1e4], [1e4]]))
    assert out.flatten().tolist() == [1.0, 3.0] and lse.flatten().tolist() == [1e4, 1e4]


def test_parts_in_bf16_are_merged_in_fp32():
    out, lse = torch.full((1, 1, 1), 1.0), torch.zeros(1, 1)
    merge_(out, lse, torch.full((1, 1, 1), 1.0 + 2**-7, dtype=torch.bfloat16), torch.zeros(1, 1))
    assert out.item() == 1.0 + 2**-8
