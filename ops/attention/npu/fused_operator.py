"""Interface of Ascend's fused attention for the npu backend, and its binding to torch_npu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.device.npu_errors import is_operator_error, operator_error_line
from mindspeed_cp.device.select import cann_problem, cann_version, load_torch_npu
from mindspeed_cp.errors import ConfigError, OperatorError
from mindspeed_cp.ops.attention.lowering.fused_call import FusedCall

#: Seed, offset and count of the random numbers that a forward call used.
DropoutState = tuple[int, int, int]


@dataclass(frozen=True)
class FusedArguments:
    """Arguments that forward and backward share.

    Attributes:
        heads: query heads.
        layout: "TND" or "BSND".
        actual_seq_qlen, actual_seq_kvlen: ends of the sequences, without a leading 0; None except in TND.
        sparse_mode, pre_tokens, next_tokens: visible pairs, together with `mask`.
        mask: True is hidden; None: no mask.
        slopes: ALiBi slopes, fp32 [heads], or None.
        start_idx: q_start_idx and kv_start_idx; given together with slopes, without which the operator ignores them.
        scale: factor of q.k.
        keep_prob: probability of keeping a weight.
    """

    heads: int
    layout: str
    actual_seq_qlen: list[int] | None
    actual_seq_kvlen: list[int] | None
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    mask: Tensor | None
    slopes: Tensor | None
    start_idx: tuple[int, int] | None
    scale: float
    keep_prob: float

    def operator_keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of both operators of torch_npu, except the scale, whose name differs."""
        starts: dict[str, Any] = {}
        if self.slopes is not None and self.start_idx is not None:
            starts = dict(
                pse=self.slopes, pse_type=2, q_start_idx=[self.start_idx[0]], kv_start_idx=[self.start_idx[1]]
            )
        lengths = (
            {}
            if self.actual_seq_qlen is None
            else dict(actual_seq_qlen=self.actual_seq_qlen, actual_seq_kvlen=self.actual_seq_kvlen)
        )
        return dict(
            atten_mask=self.mask,
            sparse_mode=self.sparse_mode,
            pre_tokens=self.pre_tokens,
            next_tokens=self.next_tokens,
            keep_prob=self.keep_prob,
            **starts,
            **lengths,
        )


class FusedOperator(Protocol):
    """The fused operators. Tensors are [rows, heads, dim] in TND, [1, rows, heads, dim] in BSND."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: FusedArguments
    ) -> tuple[Tensor, Tensor, Tensor, DropoutState]:
        """Return output, maximum and sum of the scores of each row (fp32, see `statistics`), and the state of the
        random numbers."""

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, softmax_max: Tensor, softmax_sum: Tensor,
            rng_state: DropoutState,
        arguments: FusedArguments,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dq, dk and dv; output and statistics may be those of more keys than k has."""

    def update(self, before: tuple[Tensor, Tensor, Tensor], part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Return output, maximum and sum over the keys of both, [rows, batch, heads x dim] and [batch, heads, rows,
        8]."""


class TorchNpuOperator:
    """torch_npu's npu_fusion_attention_v2, npu_fusion_attention_grad_v2 and npu_ring_attention_update.

    torch_npu is imported at the first call.
    """

    # CANN 9.1's flash_attn in Python (cann_ops_transformer) takes and gives lse, which would suit better. But by its
    # public list it has no gradient and is for Ascend 950 alone; fp32, ALiBi and dropout would stay with these here.

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: FusedArguments
    ) -> tuple[Tensor, Tensor, Tensor, DropoutState]:
        """See FusedOperator."""
        with one_line_errors(q, k, v, arguments):
            results = loaded_torch_npu().npu_fusion_attention_v2(
                q, k, v, arguments.heads, arguments.layout, scale=arguments.scale, **arguments.operator_keywords()
            )
        # The NPU's generator overwrites a caller's seed, and its offset advances by 12 a call: the gradient needs these
        # three of each call. On A2 and A3 v2 ignores softmax_layout: statistics stay per sequence.
        out, softmax_max, softmax_sum, _, seed, offset, numels = results
        return out, softmax_max, softmax_sum, (seed, offset, numels)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, softmax_max: Tensor, softmax_sum: Tensor,
            rng_state: DropoutState,
        arguments: FusedArguments,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See FusedOperator."""
        with one_line_errors(q, k, v, arguments):
            results = loaded_torch_npu().npu_fusion_attention_grad_v2(
                q, k, v, dout, arguments.heads, arguments.layout,
                softmax_max=softmax_max, softmax_sum=softmax_sum, attention_in=out, scale_value=arguments.scale,
                seed=rng_state[0], offset=rng_state[1], numels=rng_state[2], **arguments.operator_keywords(),
            )  # fmt: skip
        return results[0], results[1], results[2]

    def update(self, before: tuple[Tensor, Tensor, Tensor], part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """See FusedOperator."""
        with one_line_errors(*before, None):
            return loaded_torch_npu().npu_ring_attention_update(*before, *part, input_layout="SBH")


@contextmanager
def one_line_errors(q: Tensor, k: Tensor, v: Tensor, arguments: FusedArguments | None) -> Iterator[None]:
    """Turn an error of the operator inside the block into one line with shapes and mode of the call.

    Raises:
        OperatorError: the block raised an error of the operator.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not is_operator_error(text) or "out of memory" in text.lower():
            raise
        shapes = ", ".join(" x ".join(map(str, x.shape)) for x in (q, k, v))
        mode = "" if arguments is None else f", {arguments.layout}, sparse mode {arguments.sparse_mode}"
        raise OperatorError(
            operator_error_line(text, f" ({str(q.dtype).removeprefix('torch.')}, {shapes}{mode})")
        ) from error


@cache
def loaded_torch_npu() -> Any:
    """Import and return torch_npu.

    Raises:
        ConfigError: torch_npu is missing or does not fit this torch, or CANN is missing or too old.
    """
    package = load_torch_npu("backend is 'npu'", "backend 'cpu'")
    problem = cann_problem(cann_version())
    if problem is not None:
        raise ConfigError(f"backend is 'npu': {problem}, or backend 'cpu'")
    return package


#: Number of times that the operator repeats each statistic.
REPEATS = 8

#: Maximum number of runs of equally long sequences that are converted run by run, without an index table.
MAX_LOOPED_RUNS = 8


class StatisticsOrder:
    """Conversion between the order of the operator's softmax statistics of one call and [rows, heads].

    The operator returns maximum and sum of a row, each repeated eight times; in TND one sequence after the other, in
    BSND one batch entry, [heads, rows of the sequence, 8]::

        2 heads, sequences of 2 rows and 1     memory, each number eight times      [rows, heads]
                                               h0r0 h0r1 h1r0 h1r1 | h0r2 h1r2      r0: h0 h1   r1: h0 h1   r2: h0 h1

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
