"""Linear attention in chunks, in torch, on any device: the operator of the CPU.

In a chunk with cumulative log decay L_r up to its row r, the written values of the delta rule solve a triangular system
(Yang et al. 2412.06464, section 3; per channel: Kimi Linear 2510.26692)::

    (I + A) U = beta V - (beta K e^L) S^T     A_ri = beta_r sum_d k_rd k_id e^(L_rd - L_id), i < r
    O = (Q e^L) S^T + (Q K^T e^(L_r - L_i), i <= r) U
    S' = S e^(L_n) + U^T (K e^(L_n - L))

Only differences L_r - L_i with i <= r are exponentiated, none of which is above 0: no decay, however fast, overflows,
and what underflows is 0 in exact arithmetic of the type, too. L is summed in fp64, as differences of large sums would
lose the digits of small ones.

All chunks of a rank are computed at once, but for the recurrence over S: it goes through the first chunks of all
segments, then through their second ones, and so on; long segments come first, so that those that are left are a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.linear_attention.contract import SegmentTable, StateInputs, state_dtype
from mindspeed_cp.plan.states import StateConfig

CHUNK = 64  # rows of a chunk; a power of two


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Chunks of all segments, by their number inside a segment, then by segment, the one with the most chunks first.

    Attributes:
        rows: rows of each chunk, int64 [chunks * size]; the number of rows, where a chunk is shorter.
        place: where each row is in `rows`, int64 [t].
        active: chunks of each number, that is, segments that have so many.
        slot: where each segment is among all by their number of chunks, int64 [segments].
        size: rows of a full chunk.
    """

    rows: Tensor
    place: Tensor
    active: list[int]
    slot: np.ndarray
    size: int

    @staticmethod
    def of_table(table: SegmentTable) -> _Chunks:
        """Return the chunks of a table; it keeps them."""
        return table.keep("chunks", lambda: _Chunks._build(table))

    @staticmethod
    def _build(table: SegmentTable) -> _Chunks:
        lengths, offsets, rows = table.lengths, table.offsets, int(table.offsets[-1])
        longest = int(lengths.max(initial=1))
        size = min(CHUNK, 1 << (longest - 1).bit_length())
        counts = -(-lengths // size)
        order = np.argsort(-counts, kind="stable")
        slot = np.empty(len(order), np.int64)
        slot[order] = np.arange(len(order))
        active = [int((counts > number).sum()) for number in range(int(counts.max(initial=0)))]
        segment = np.concatenate([np.zeros(0, np.int64), *(order[:count] for count in active)])
        number = np.repeat(np.arange(len(active)), active)
        first = offsets[segment] + number * size
        table_rows = first[:, None] + np.arange(size)
        table_rows = np.where(table_rows < offsets[segment + 1][:, None], table_rows, rows).reshape(-1)
        place = np.empty(rows + 1, np.int64)
        place[table_rows] = np.arange(len(table_rows))
        return _Chunks(table.index(table_rows), table.index(place[:rows]), active, slot, size)

    def slots(self, table: SegmentTable, name: str) -> Tensor:
        """Return where segments of a table are by their number of chunks, on the device."""
        return table.keep((name, "slots"), lambda: table.index(self.slot[getattr(table, name)]))

    def of_segments(self, table: SegmentTable, name: str) -> tuple[list[Tensor], Tensor]:
        """Return the first, second, ... chunks of segments of a table, those with the most chunks first, and where each
        segment stands among them."""

        def build() -> tuple[list[Tensor], Tensor]:
            slots = self.slot[getattr(table, name)]
            begins = np.cumsum([0, *self.active])[:-1]
            numbers = [begin + np.sort(slots[slots < count]) for begin, count in zip(begins, self.active, strict=True)]
            return [table.index(chunk) for chunk in numbers if len(chunk)], table.index(np.argsort(np.argsort(slots)))

        return table.keep((name, "chunks"), build)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Chunks without what enters them, [chunks, heads, rows, channels] in the type of states.

    Attributes:
        table, chunks, dtype: of the rows; type of the output.
        reads: scale Q e^L.
        scores: scale (Q K^T e^(L_r - L_i)), [chunks, heads, rows, rows].
        writes: K e^(L_n - L).
        values: U with S = 0.
        erases: what S^T is multiplied with and subtracted from U; None without a delta term.
        log_decay: L_n, [chunks, heads, 1, channels or 1], fp64.
    """

    table: SegmentTable
    chunks: _Chunks
    dtype: torch.dtype
    reads: Tensor
    scores: Tensor
    writes: Tensor
    values: Tensor
    erases: Tensor | None
    log_decay: Tensor


class ChunkedOperator:
    """The chunked form in torch, see :mod:`mindspeed_cp.ops.linear_attention.chunked`."""

    name = "torch"

    def check(self, config: StateConfig, dtype: torch.dtype, device: torch.device) -> None:
        """See :class:`mindspeed_cp.ops.linear_attention.StateOperator`."""
        if not dtype.is_floating_point:
            raise ConfigError(f"q is {dtype}; valid: a type of floating-point numbers")

    def prepare(self, x: StateInputs, config: StateConfig, table: SegmentTable) -> _Prepared:
        """See :class:`mindspeed_cp.ops.linear_attention.StateOperator`."""
        chunks, dtype = _Chunks.of_table(table), state_dtype(x.v.dtype)

        def chunked(rows: Tensor, to: torch.dtype) -> Tensor:
            """Return rows [t, heads, channels] as chunks; those that are missing are 0 and change nothing."""
            padded = torch.cat([rows.to(to), rows.new_zeros((1, *rows.shape[1:]), dtype=to)])
            chosen = padded.index_select(0, chunks.rows)
            return chosen.unflatten(0, (sum(chunks.active), chunks.size)).transpose(1, 2)

        q, k, v = (chunked(rows, dtype) for rows in (x.q, x.k, x.v))
        gate = x.gate if config.has_channel_gates else x.gate.unsqueeze(-1)
        log = chunked(gate, torch.float64).cumsum(2)
        beta = None if x.beta is None else chunked(x.beta.unsqueeze(-1), dtype)
        decay = log.to(dtype).exp()
        last = log[:, :, -1:]
        q = q * config.factor
        # the diagonal is 1 whatever the gates are: its gradients would cancel to rounding
        pairs = None if config.has_channel_gates else (log - log.mT).tril(-1).to(dtype).exp().tril()

        def decayed(rows: Tensor) -> Tensor:
            """Return products of rows with k, decayed from one to the other, and 0 where k comes later."""
            return _decayed_products(rows, k, log) if pairs is None else rows @ k.mT * pairs

        scores = decayed(q)
        values, erases = v if beta is None else beta * v, None
        if config.has_delta:
            assert beta is not None
            both = torch.cat([values, beta * k * decay], -1)
            # the diagonal counts as 1
            both = torch.linalg.solve_triangular(beta * decayed(k), both, upper=False, unitriangular=True)
            values, erases = both.split([v.shape[-1], k.shape[-1]], -1)
        writes = k * (last - log).to(dtype).exp()
        return _Prepared(table, chunks, x.v.dtype, q * decay, scores, writes, values, erases, last)

    @torch.no_grad()
    def maps(self, prepared: _Prepared) -> tuple[Tensor, Tensor]:
        """See :class:`mindspeed_cp.ops.linear_attention.StateOperator`."""
        table, (_, heads, _, channels_v) = prepared.table, prepared.values.shape
        channels = prepared.writes.shape[-1]
        numbers, where = prepared.chunks.of_segments(table, "carried")
        zero = prepared.values.new_zeros(len(table.carried), heads, channels_v, channels)
        states = self._last_states(prepared, numbers, prepared.values, zero)[where]
        numbers, where = prepared.chunks.of_segments(table, "mapped")
        if prepared.erases is None:  # a factor of each head: the decay of the whole segment
            log = prepared.log_decay.new_zeros(len(table.mapped), heads, 1, 1)
            for chunk in numbers:
                log[: len(chunk)] += prepared.log_decay[chunk]
            return log.exp().to(states.dtype)[where], states
        eye = torch.eye(channels, dtype=zero.dtype, device=zero.device).expand(len(table.mapped), heads, -1, -1)
        return self._last_states(prepared, numbers, None, eye)[where], states

    def _last_states(self, prepared: _Prepared, numbers: list[Tensor], values: Tensor | None, state: Tensor) -> Tensor:
        """Return what segments make of states, [segments, heads, any, head_dim], if they write `values`, or nothing."""
        ends = []
        for position, chunk in enumerate(numbers):
            written = None if values is None else values[chunk]
            if prepared.erases is not None:
                erased = prepared.erases[chunk] @ state.mT
                written = -erased if written is None else written - erased
            assert written is not None
            decay = prepared.log_decay[chunk].to(state.dtype).exp()
            state = state * decay + written.mT @ prepared.writes[chunk]
            left = len(numbers[position + 1]) if position + 1 < len(numbers) else 0
            ends.append(state[left:])
            state = state[:left]
        return torch.cat(ends[::-1]) if ends else state

    def run(self, prepared: _Prepared, entering: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`mindspeed_cp.ops.linear_attention.StateOperator`."""
        table, chunks = prepared.table, prepared.chunks
        decay = prepared.log_decay.to(prepared.writes.dtype).exp()
        per_number = [x.split(chunks.active) for x in (prepared.values, prepared.writes, decay)]
        erases = prepared.erases.split(chunks.active) if prepared.erases is not None else None
        _, heads, _, channels_v = prepared.values.shape
        state = prepared.values.new_zeros(len(table.lengths), heads, channels_v, prepared.writes.shape[-1])
        if len(table.entered):
            state = state.index_copy(0, chunks.slots(table, "entered"), entering)
        begins, written, ends = [], [], []
        for number, (values, writes, factor) in enumerate(zip(*per_number, strict=True)):
            begins.append(state)
            written.append(values if erases is None else values - erases[number] @ state.mT)
            state = state * factor + written[-1].mT @ writes
            left = chunks.active[number + 1] if number + 1 < len(chunks.active) else 0
            ends.append(state[left:])
            state = state[:left]
        if not begins:  # a rank without rows
            return prepared.values.transpose(1, 2).reshape(0, heads, channels_v).to(prepared.dtype), entering[:0]
        out = prepared.reads @ torch.cat(begins).mT + prepared.scores @ torch.cat(written)
        rows = out.transpose(1, 2).flatten(0, 1).index_select(0, chunks.place).to(prepared.dtype)
        last = torch.cat(ends[::-1])
        return rows, last.index_select(0, chunks.slots(table, "carried"))


def _decayed_products(a: Tensor, b: Tensor, log: Tensor) -> Tensor:
    """Return sum_d a_rd b_id e^(L_rd - L_id) for i <= r, and 0 for i > r; [..., rows, rows].

    Blocks on the diagonal are joined two by two: rows of the second meet those of the first at its first row s, as
    e^(L_r - L_s) e^(L_s - L_i), and both exponents are at most 0.

    Args:
        a, b: [chunks, heads, rows, channels]; the number of rows is a power of two.
        log: L, [chunks, heads, rows, channels], fp64, which does not grow from row to row.
    """
    rows, half = a.shape[2], 1
    out = (a * b).sum(-1)[..., None, None]  # [chunks, heads, blocks, half, half]
    while half < rows:
        pairs = (rows // (2 * half), 2, half)
        first, second = log.unflatten(2, pairs).unbind(3)
        middle = second[:, :, :, :1]
        later = a.unflatten(2, pairs)[:, :, :, 1] * (second - middle).to(a.dtype).exp()
        earlier = b.unflatten(2, pairs)[:, :, :, 0] * (middle - first).to(a.dtype).exp()
        upper, lower = out.unflatten(2, pairs[:2]).unbind(3)
        below = torch.cat([later @ earlier.mT, lower], -1)
        out = torch.cat([torch.cat([upper, torch.zeros_like(upper)], -1), below], -2)
        half *= 2
    return out.squeeze(2)
