"""Digests of weights: every change of one element and every exchange of two is seen, and most ranks are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindspeed_cp.train import replica_digest
from mindspeed_cp.train.replica_digest import BLOCK, CHUNK, differing, digest, digest_all

DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    """Of the first and last elements, and of those on both sides of a border of blocks."""
    x = numbers(BLOCK + 5, dtype)
    bits = x.view(DTYPES[dtype])
    before = digest(x).item()
    for index in (0, 1, BLOCK - 1, BLOCK, len(x) - 1):
        for bit in range(8 * x.element_size()):
            mask = 1 << bit if bit < 8 * x.element_size() - 1 else -(1 << bit)
            bits[index] ^= mask
            assert digest(x).item() != before, (index, bit)
            bits[index] ^= mask
    assert digest(x).item() == before


def test_exchanged_elements_are_seen_in_a_block_between_blocks_and_between_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_digest, "CHUNK", 2 * BLOCK)
    x = numbers(5 * BLOCK + 77, torch.float32)
    before = digest(x).item()
    for first, second in ((0, 1), (3, BLOCK + 3), (9, 2 * BLOCK + 9), (2 * BLOCK, 4 * BLOCK), (5, len(x) - 1)):
        y = x.clone()
        y[[first, second]] = x[[second, first]]
        assert digest(y).item() != before
    blocks = x.clone()
    blocks[:BLOCK], blocks[BLOCK : 2 * BLOCK] = x[BLOCK : 2 * BLOCK], x[:BLOCK]
    assert digest(blocks).item() != before
    assert digest(-x).item() != before


def test_a_digest_depends_on_bits_and_places_alone() -> None:
    x = numbers(CHUNK + 3, torch.bfloat16)
    for shape in ((1, -1), (-1, 1)):
        assert digest(x.view(shape)).item() == digest(x).item()
    wide = numbers(600, torch.float32).view(20, 30)
    assert digest(wide.T).item() == digest(wide.T.contiguous()).item() != digest(wide).item()
    assert digest(torch.zeros(4)).item() != digest(-torch.zeros(4)).item()
    assert digest(torch.empty(0)).item() == 0
    assert digest_all([x, wide]).tolist() == [digest(x).item(), digest(wide).item()]


@pytest.mark.parametrize(
    ("digests", "parts", "expected"),
    [
        ([5, 5, 5, 5], [0, 0, 0, 0], []),
        ([5, 6, 5, 6], [0, 1, 0, 1], []),
        ([5, 5, 7, 5], [0, 0, 0, 0], [([2], [0, 1, 3])]),
        ([5, 7], [0, 0], [([0, 1], [])]),
        ([5, 5, 7, 7], [0, 0, 0, 0], [([0, 1, 2, 3], [])]),
        ([5, 6, 5, 8, 5, 6], [0, 1, 0, 1, 0, 1], [([3], [1, 5])]),
        ([5, 6, 7, 8], [0, 1, 2, 3], []),
    ],
)
def test_most_ranks_with_the_same_part_are_right(
    digests: list[int], parts: list[int], expected: list[tuple[list[int], list[int]]]
) -> None:
    assert differing(np.array(digests), np.array(parts)) == expected
