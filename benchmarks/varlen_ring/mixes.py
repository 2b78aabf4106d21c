"""Global batches of a mix of short and long documents, and their packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.data import Packer
from mindspeed_cp.data.stream import LOOKAHEAD

#: Tokens of the shortest document, and the border between short and long ones.
SHORTEST, BORDER = 256, 2**15

#: Documents from which rows are packed.
DRAWN = 20_000


def draw_lengths(long_share: float, context: int, random: np.random.Generator, count: int = DRAWN) -> np.ndarray:
    """Draw lengths of documents, int64 [count].

    Args:
        long_share: part of the tokens, on average, that is in documents of BORDER tokens or more.
        context: tokens of the longest document, at least BORDER.
        random: generator.
        count: number of documents.
    """
    means = [_mean_of_log_uniform(SHORTEST, BORDER), _mean_of_log_uniform(BORDER, context)]
    weights = np.array([1 - long_share, long_share]) / means  # documents of each kind for a token of the batch
    is_long = random.random(count) < weights[1] / weights.sum()
    low, high = np.where(is_long, BORDER, SHORTEST), np.where(is_long, context, BORDER)
    return np.minimum(np.exp(np.log(low) + random.random(count) * np.log(high / low)).astype(np.int64), context)


def _mean_of_log_uniform(low: int, high: int) -> float:
    return float(low) if low == high else (high - low) / float(np.log(high / low))


def packed_rows(lengths: np.ndarray, context: int, rows: int, seed: int) -> list[np.ndarray]:
    """Return the lengths of the documents of packed rows, in the order in which training packs them."""
    packer = Packer(lengths, context, seed, LOOKAHEAD)
    return [packer.next_row()["length"] for _ in range(rows)]


def sorted_rows(rows: Sequence[np.ndarray], context: int) -> list[np.ndarray]:
    """Return rows of neighbours in the order of length: the longest documents first, each row filled until the next one
    does not fit. Long and short documents do not share a row, and rows may be more than before."""
    lengths = np.sort(np.concatenate(rows))[::-1]
    out: list[list[int]] = [[]]
    room = context
    for length in lengths.tolist():
        if length > room:
            out.append([])
            room = context
        out[-1].append(length)
        room -= length
    return [np.array(row, np.int64) for row in out]
