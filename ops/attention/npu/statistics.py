"""Conversion between the order of the operator's softmax statistics and [rows, heads].

The operator returns maximum and sum of a row, each repeated eight times; in TND one sequence after the other, in BSND
one batch entry, [heads, rows of the sequence, 8]::

    2 heads, sequences of 2 rows and 1     memory, each number eight times      [rows, heads]
                                           h0r0 h0r1 h1r0 h1r1 | h0r2 h1r2      r0: h0 h1   r1: h0 h1   r2: h0 h1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ops.attention.lowering.fused_call import FusedCall

#: Number of times that the operator repeats each statistic.
REPEATS = 8

#: Maximum number of runs of equally long sequences that are converted run by run, without an index table.
MAX_LOOPED_RUNS = 8


class StatisticsOrder:
    """Order of the statistics of one call.

    Args:
        ends: ends of the sequences, without a leading 0.
        heads: query heads of the call.
        device: device of the index tables.
    """

    def __init__(self, ends: Sequence[int], heads: int, device: torch.device) -> None:
        lengths = np.diff(np.array(ends, np.int64), prepend=0)
        lengths = lengths[lengths > 0]
        begins = np.flatnonzero(np.append(True, lengths[1:] != lengths[:-1]))
        sequences = np.diff(np.append(begins, len(lengths)))
        self._runs = list(zip(lengths[begins].tolist(), sequences.tolist(), strict=True))
        self._heads = heads
        self._tables: tuple[Tensor, Tensor] | None = None
        if len(self._runs) > MAX_LOOPED_RUNS:
            index = _row_head_index(lengths, heads)
            inverse = np.empty_like(index)
            inverse[index] = np.arange(len(index), dtype=np.int32)
            self._tables = torch.from_numpy(index).to(device), torch.from_numpy(inverse).to(device)

    def to_rows(self, statistic: Tensor) -> Tensor:
        """Return a statistic of the operator, of any shape, as [rows, heads]."""
        flat = statistic.reshape(-1, REPEATS)[:, 0]
        if self._tables is not None:
            return flat.index_select(0, self._tables[0]).view(-1, self._heads)
        parts, start = [], 0
        for length, sequences in self._runs:
            n = length * sequences * self._heads
            part = flat[start : start + n].reshape(sequences, self._heads, length)
            parts.append(part.transpose(1, 2).reshape(-1, self._heads))
            start += n
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return [rows, heads] as [rows, heads, 8] in the operator's order."""
        if self._tables is not None:
            flat = rows.reshape(-1).index_select(0, self._tables[1])
        else:
            parts, start = [], 0
            for length, sequences in self._runs:
                part = rows[start : start + length * sequences].reshape(sequences, length, self._heads)
                parts.append(part.transpose(1, 2).reshape(-1))
                start += length * sequences
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat.unsqueeze(1).expand(-1, REPEATS).reshape(*rows.shape, REPEATS)


def _row_head_index(lengths: np.ndarray, heads: int) -> np.ndarray:
    """Return the index of each (row, head) in the operator's order, int32 [rows * heads]."""
    start = np.cumsum(lengths) - lengths
    row = np.arange(int(lengths.sum()), dtype=np.int64)
    first, length = np.repeat(start, lengths), np.repeat(lengths, lengths)
    index = (first * heads + row - first)[:, None] + length[:, None] * np.arange(heads)
    return index.reshape(-1).astype(np.int32)


def statistics_order(call: FusedCall, heads: int, device: torch.device) -> StatisticsOrder:
    """Return the order of the statistics of a call; built at the first use."""
    key = device, heads
    if key not in call.device_cache:
        call.device_cache[key] = StatisticsOrder(call.actual_seq_qlen, heads, device)
    return call.device_cache[key]
