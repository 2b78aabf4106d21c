"""The stand-in's random bits for dropout: in place of the generator of a device, with its interface.

torch_npu takes (seed, offset) from the NPU generator and the number of elements from the shapes (`numels`), has the
operator aclnnDropoutGenMaskV2 make a bit mask, and hands that to the attention operator; the gradient makes the same
mask from the same three numbers. A device uses Philox; these bits are of this file alone:

    bit i = 1 (keep) iff the upper 24 bits of word i, as a fraction, are >= 1 - keep_prob,
    word i = i-th output of splitmix64 started at splitmix64(splitmix64(seed) ^ offset).

Byte b holds bits 8b .. 8b+7, the lowest first; the mask is padded with 0 to whole 128 bits. The elements of a call are
those of [N, Sq, Skv], C order, sequence after sequence (batch entry after batch entry).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.host_cann.cann_rule import need

STEP, ONES = 0x9E3779B97F4A7C15, 2**64 - 1
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mask_bytes(numels: int) -> int:
    """Bytes of the mask of that many elements: whole groups of 128 bits."""
    return (numels + 127) // 128 * 16


def dropout_numels(heads: int, sizes: Iterable[tuple[int, int]]) -> int:
    """Elements of the mask of a call: heads * sum(Sq * Skv), as torch_npu counts them."""
    return heads * sum(sq * sk for sq, sk in sizes)


def splitmix(state: int) -> int:
    """The next output of splitmix64 at that state."""
    z = (state + STEP) & ONES
    z = ((z ^ (z >> 30)) * FACTORS[0]) & ONES
    z = ((z ^ (z >> 27)) * FACTORS[1]) & ONES
    return z ^ (z >> 31)


def signed(x: int) -> int:
    """The int64 of the same bits."""
    return x - 2**64 if x >= 2**63 else x


def words(seed: int, offset: int, first: int, last: int) -> Tensor:
    """Words [first, last) as int64."""
    start = splitmix(splitmix(seed & ONES) ^ (offset & ONES))
    z = torch.arange(first + 1, last + 1) * signed(STEP) + signed(start)
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * signed(factor)
    return z ^ ((z >> 31) & (2**33 - 1))


def dropout_bits(seed: int, offset: int, numels: int, drop_prob: float) -> Tensor:
    """The bit mask of `numels` elements, uint8 [mask_bytes(numels)]: 1 keeps, each dropped with `drop_prob`."""
    need(
        numels >= 0 and 0 <= drop_prob <= 1, f"not modelled: dropout mask of {numels} elements, probability {drop_prob}"
    )
    size = mask_bytes(numels) * 8
    bits = torch.zeros(size, dtype=torch.uint8)
    for first in range(0, numels, 2**20):
        last = min(first + 2**20, numels)
        upper = (words(seed, offset, first, last) >> 40) & (2**24 - 1)
        bits[first:last] = (upper >= drop_prob * 2**24).to(torch.uint8)
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8)
    return (bits.view(-1, 8) * weights).sum(-1, dtype=torch.uint8)


def kept(mask: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    """Elements of the mask from number `first` on, bool, in that shape."""
    count = torch.Size(shape).numel()
    low = first // 8
    part = mask[low : (first + count + 7) // 8]
    bits = (part[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[first - 8 * low :][:count].view(shape).bool()
