"""The operator's softmax statistics, and back.

The operator gives maximum and sum of a row, each eight times, and in TND not in the order of rows: one sequence after
the other, [heads, rows of the sequence, 8]. Here they are [rows, heads], for all sequences::

    2 heads, sequences of 2 rows and 1     memory, each number eight times      here
                                           h0r0 h0r1 h1r0 h1r1 | h0r2 h1r2      r0: h0 h1   r1: h0 h1   r2: h0 h1
"""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

#: The operator repeats each statistic so often.
TIMES = 8

#: Up to so many runs of equally long sequences are moved run by run, without a table of places.
FEW = 8


class Order:
    """The order of statistics of one call.

    Args:
        ends: ends of the sequences, without a leading 0.
        heads: query heads of the call.
        device: where tables lie.
    """

    def __init__(self, ends: list[int], heads: int, device: torch.device) -> None:
        lengths = [b - a for a, b in pairwise([0, *ends]) if b > a]
        self._runs = [(length, len(list(same))) for length, same in groupby(lengths)]
        self._heads = heads
        self._tables: tuple[Tensor, Tensor] | None = None
        if len(self._runs) > FEW:
            places = _places(np.array(lengths, np.int64), heads)
            back = np.empty_like(places)
            back[places] = np.arange(len(places), dtype=np.int32)
            self._tables = torch.from_numpy(places).to(device), torch.from_numpy(back).to(device)

    def read(self, statistic: Tensor) -> Tensor:
        """[rows, heads] of the operator's statistic, whatever shape it says that it has."""
        flat = statistic.reshape(-1, TIMES)[:, 0]
        if self._tables is not None:
            return flat.index_select(0, self._tables[0]).view(-1, self._heads)
        parts, at = [], 0
        for length, many in self._runs:
            n = length * many * self._heads
            part = flat[at : at + n].reshape(many, self._heads, length)
            parts.append(part.transpose(1, 2).reshape(-1, self._heads))
            at += n
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, rows: Tensor) -> Tensor:
        """[rows, heads, 8], in the operator's order, of [rows, heads]."""
        if self._tables is not None:
            flat = rows.reshape(-1).index_select(0, self._tables[1])
        else:
            parts, at = [], 0
            for length, many in self._runs:
                part = rows[at : at + length * many].reshape(many, length, self._heads)
                parts.append(part.transpose(1, 2).reshape(-1))
                at += length * many
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat.unsqueeze(1).expand(-1, TIMES).reshape(*rows.shape, TIMES)


def _places(lengths: np.ndarray, heads: int) -> np.ndarray:
    """Where each (row, head) is in the operator's order, int32 [rows * heads]."""
    start = np.cumsum(lengths) - lengths
    row = np.arange(int(lengths.sum()), dtype=np.int64)
    first, length = np.repeat(start, lengths), np.repeat(lengths, lengths)
    place = (first * heads + row - first)[:, None] + length[:, None] * np.arange(heads)
    return place.reshape(-1).astype(np.int32)
