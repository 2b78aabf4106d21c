"""Dropout masks as a function of seed, layer, head, document and positions, independent of ranks, tiles and order."""

from __future__ import annotations

import torch
from torch import Tensor

#: Golden-ratio increment and the multipliers of SplitMix64, as signed 64-bit numbers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31


def keep_mask(
    seed: int, layer: int, heads: Tensor, document: int, q_positions: Tensor, k_positions: Tensor, p: float
) -> Tensor:
    """Return the mask of attention weights that are kept.

    The bit of a weight depends only on seed, layer, head, document, query position and key position, so that it is the
    same for any number of ranks, any algorithm and any cut into tiles. It comes from a tree of SplitMix64 generators
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with Stafford's mixing
    constants, variant 13): output number `layer` of the generator of the seed seeds the generator of the layer, and so
    on for head, document and query; the weight is kept if output number `key` of the generator of the query, a 64-bit
    number, is at least p * 2**64.

    Args:
        seed: any integer, taken modulo 2**64.
        layer: number of the layer.
        heads: int64 [heads], head numbers in the whole layer.
        document: number of the document in the batch.
        q_positions: int64 [q], positions in the document.
        k_positions: int64 [k].
        p: dropout probability, from 0 to below 1.

    Returns:
        bool [heads, q, k] on the device of q_positions, False where the weight is dropped. Divide kept weights
        by 1 - p.
    """
    device = q_positions.device
    state = _wrap_int64(seed, device)
    for number in (_wrap_int64(layer, device), heads.to(device), _wrap_int64(document, device)):
        state = _output(state, number)  # [heads] from the heads on
    state = _output(state[:, None], q_positions)
    return _output(state[..., None], k_positions) >= round(p * 2.0**64) - 2**63


def _output(seed: Tensor, number: Tensor) -> Tensor:
    """Return output `number` (from 0) of the SplitMix64 generators of these seeds, broadcast; int64 wraps."""
    z = seed + (number + 1) * _GAMMA
    for shift, multiplier in _MULTIPLIERS:
        z ^= _shift_right(z, shift)
        z *= multiplier
    z ^= _shift_right(z, _LAST_SHIFT)
    return z


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Return the unsigned right shift."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _wrap_int64(value: int, device: torch.device) -> Tensor:
    """Return value modulo 2**64 as int64."""
    return torch.tensor((value + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)
