"""Ascend's fused attention as the npu backend calls it, and its binding to torch_npu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from mindspeed_cp.devices import cann_version, check_cann, load_torch_npu
from mindspeed_cp.errors import ConfigError, OperatorError
from mindspeed_cp.npu_errors import is_operator, operator_line

#: seed, offset and number of random numbers that a forward call used.
Kept = tuple[int, int, int]


@dataclass(frozen=True)
class Masking:
    """The arguments that forward and backward share.

    Attributes:
        heads: query heads.
        layout: "TND" or "BSND".
        cu_q, cu_k: ends of the sequences, without a leading 0; None but in TND.
        sparse_mode, pre, next: which pairs are visible, together with `mask`.
        mask: True is hidden; None: everything is visible.
        slopes: of ALiBi, fp32 [heads], or None.
        starts: q_start_idx and kv_start_idx; given where slopes are. The operator ignores one without the other.
        scale: factor of q.k.
        keep_prob: share of the weights that is not dropped.
    """

    heads: int
    layout: str
    cu_q: list[int] | None
    cu_k: list[int] | None
    sparse_mode: int
    pre: int
    next: int
    mask: Tensor | None
    slopes: Tensor | None
    starts: tuple[int, int] | None
    scale: float
    keep_prob: float

    def arguments(self) -> dict[str, Any]:
        """As both operators of torch_npu name them, but for the scale."""
        starts: dict[str, Any] = {}
        if self.slopes is not None and self.starts is not None:
            starts = dict(pse=self.slopes, pse_type=2, q_start_idx=[self.starts[0]], kv_start_idx=[self.starts[1]])
        lengths = {} if self.cu_q is None else dict(actual_seq_qlen=self.cu_q, actual_seq_kvlen=self.cu_k)
        return dict(
            atten_mask=self.mask,
            sparse_mode=self.sparse_mode,
            pre_tokens=self.pre,
            next_tokens=self.next,
            keep_prob=self.keep_prob,
            **starts,
            **lengths,
        )


class FusedOperator(Protocol):
    """The fused operators. Tensors are [rows, heads, dim] in TND, [1, rows, heads, dim] in BSND."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Masking) -> tuple[Tensor, Tensor, Tensor, Kept]:
        """Output, maximum and sum of each row's scores (fp32, see npu_statistics), and what the backward needs to drop
        the same weights."""

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, most: Tensor, total: Tensor, kept: Kept,
        how: Masking,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """dq, dk and dv, from an output and statistics that may be those of more keys."""

    def update(self, before: tuple[Tensor, Tensor, Tensor], part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Output, maximum and sum over the keys of both; [rows, batch, heads x dim] and [batch, heads, rows, 8]."""


class TorchNpu:
    """torch_npu's npu_fusion_attention_v2, npu_fusion_attention_grad_v2 and npu_ring_attention_update.

    torch_npu is imported at the first call.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Masking) -> tuple[Tensor, Tensor, Tensor, Kept]:
        """See FusedOperator."""
        with refusals(q, k, v, how):
            found = torch_npu().npu_fusion_attention_v2(
                q, k, v, how.heads, how.layout, scale=how.scale, **how.arguments()
            )
        out, most, total, _, seed, offset, numels = found
        return out, most, total, (seed, offset, numels)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, most: Tensor, total: Tensor, kept: Kept,
        how: Masking,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See FusedOperator."""
        with refusals(q, k, v, how):
            found = torch_npu().npu_fusion_attention_grad_v2(
                q, k, v, dout, how.heads, how.layout,
                softmax_max=most, softmax_sum=total, attention_in=out, scale_value=how.scale,
                seed=kept[0], offset=kept[1], numels=kept[2], **how.arguments(),
            )  # fmt: skip
        return found[0], found[1], found[2]

    def update(self, before: tuple[Tensor, Tensor, Tensor], part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """See FusedOperator."""
        with refusals(*before, None):
            return torch_npu().npu_ring_attention_update(*before, *part, input_layout="SBH")


@contextmanager
def refusals(q: Tensor, k: Tensor, v: Tensor, how: Masking | None) -> Iterator[None]:
    """Turn torch_npu's refusal of a call into one line with the call.

    Raises:
        OperatorError: what the block raised was the operator's.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not is_operator(text) or "out of memory" in text.lower():
            raise
        shapes = ", ".join(" x ".join(map(str, x.shape)) for x in (q, k, v))
        mode = "" if how is None else f", {how.layout}, sparse mode {how.sparse_mode}"
        raise OperatorError(operator_line(text, f" ({str(q.dtype).removeprefix('torch.')}, {shapes}{mode})")) from error


@cache
def torch_npu() -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed, is not the one for this torch, or CANN is not there or too old.
    """
    package = load_torch_npu("backend is 'npu'", "backend 'cpu'")
    wrong = check_cann(cann_version())
    if wrong is not None:
        raise ConfigError(f"backend is 'npu': {wrong}, or backend 'cpu'")
    return package
