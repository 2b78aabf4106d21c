"""Rows packed and unpacked by runs: the copy behind zig-zag halves, redistribution and remap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import current, implementation_for, need
from mindspeed_cp.layout import expand

#: Rows and elements of a row that a program copies.
ROWS, COLUMNS = 16, 256

#: Tensors of one launch: q, k and v.
MOST_TENSORS = 3


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of rows on a device, cut so that a program copies each.

    Attributes:
        table: int32 [pieces, 3]: first source row, first target row, rows (at most ROWS).
        back: the same with source and target exchanged.
        source, target: int64 [rows], the same row by row.
    """

    table: Tensor
    back: Tensor
    source: Tensor
    target: Tensor

    @staticmethod
    def of(source: np.ndarray, target: np.ndarray, rows: np.ndarray, device: torch.device | str = "cpu") -> Runs:
        """Of first source rows, first target rows and numbers of rows, each int [runs]; empty runs go.

        Raises:
            ConfigError: lengths differ, something is negative, or two runs have a target row in common.
        """
        a, b, n = (np.asarray(x, np.int64).reshape(-1) for x in (source, target, rows))
        need(
            len(a) == len(b) == len(n),
            "the number of source rows, target rows and counts",
            (len(a), len(b), len(n)),
            "equal",
        )
        need(all((x >= 0).all() for x in (a, b, n)), "a row or count", "negative", "0 or more")
        a, b, n = a[n > 0], b[n > 0], n[n > 0]
        order = np.argsort(b, kind="stable")
        apart = b[order][1:] >= (b + n)[order][:-1]
        need(bool(apart.all()), "a target row", "in two runs", "runs whose targets lie apart")
        pieces = -(-n // ROWS)
        step = expand(np.zeros_like(pieces), pieces) * ROWS
        of = np.repeat(np.arange(len(n)), pieces)
        table = np.stack([a[of] + step, b[of] + step, np.minimum(n[of] - step, ROWS)], 1).astype(np.int32)
        back = np.ascontiguousarray(table[:, [1, 0, 2]])
        return Runs(*(torch.from_numpy(x).to(device) for x in (table, back, expand(a, n), expand(b, n))))

    def reversed(self) -> Runs:
        """From target to source."""
        return Runs(self.back, self.table, self.target, self.source)


def gather_spans(
    sources: Sequence[Tensor], targets: Sequence[Tensor], runs: Runs, implementation: str | None = None
) -> None:
    """Copy runs of rows, of one to three tensors in one launch.

    Args:
        sources: [rows, ...] each, contiguous, of one type; their rows may be of different size.
        targets: [rows, ...] each, of the same sizes of rows.
        runs: which rows go where. Rows of a target that no run names keep what they have.
        implementation: see :func:`implementation_for`.

    Raises:
        ConfigError: the tensors do not go together.
    """
    _copy(sources, targets, runs, False, implementation)


def scatter_spans(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    runs: Runs,
    add: bool = False,
    implementation: str | None = None,
) -> None:
    """The way back of :func:`gather_spans` with the same runs: from target rows to source rows; with `add` they are
    added to what is there, in fp32, and rounded once."""
    _copy(sources, targets, runs.reversed(), add, implementation)


def _copy(
    sources: Sequence[Tensor], targets: Sequence[Tensor], runs: Runs, add: bool, implementation: str | None
) -> None:
    need(
        1 <= len(sources) == len(targets) <= MOST_TENSORS,
        "the number of tensors",
        (len(sources), len(targets)),
        "1 to 3 pairs",
    )
    for x, y in zip(sources, targets, strict=True):
        need(x.shape[1:] == y.shape[1:], "a row's shape", f"{list(x.shape[1:])} and {list(y.shape[1:])}", "equal")
        need(x.is_contiguous() and y.is_contiguous(), "a tensor", "not contiguous", "contiguous")
        need(add or x.dtype == y.dtype, "the types", f"{x.dtype} and {y.dtype}", "equal")
    if implementation_for(sources[0], implementation) == "triton":
        _launch(sources, targets, runs, add)
        return
    for x, y in zip(sources, targets, strict=True):
        if add:
            y[runs.target] = (y[runs.target].float() + x[runs.source].float()).to(y.dtype)
        else:
            y.index_copy_(0, runs.target, x.index_select(0, runs.source))


def _launch(sources: Sequence[Tensor], targets: Sequence[Tensor], runs: Runs, add: bool) -> None:
    from mindspeed_cp.ascend_kernels.device.spans import copy_spans_kernel

    widths = [x[0].numel() if len(x) else 0 for x in sources]
    blocks = sum(-(-width // COLUMNS) for width in widths)
    if not len(runs.table) or not blocks:
        return
    more = MOST_TENSORS - len(sources)
    xs, ys = ([*tensors, *[tensors[0]] * more] for tensors in (sources, targets))
    wide = [*widths, *[0] * more]
    with current(xs[0]):
        copy_spans_kernel[(len(runs.table), blocks)](
            *xs, *ys, runs.table, WIDTH0=wide[0], WIDTH1=wide[1], WIDTH2=wide[2], ROWS=ROWS, COLUMNS=COLUMNS, ADD=add
        )
