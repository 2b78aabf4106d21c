"""Rows packed and unpacked by runs: the copy behind zig-zag halves, redistribution and remap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import check_tensor, current, grid, implementation_for, need
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
        reach: rows that a source and a target have at least.
        source_apart, target_apart: whether no row is in two runs.
    """

    table: Tensor
    back: Tensor
    source: Tensor
    target: Tensor
    reach: tuple[int, int]
    source_apart: bool = True
    target_apart: bool = True

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
        need(_apart(b, n), "a target row", "in two runs", "runs whose targets lie apart")
        pieces = -(-n // ROWS)
        step = expand(np.zeros_like(pieces), pieces) * ROWS
        of = np.repeat(np.arange(len(n)), pieces)
        table = np.stack([a[of] + step, b[of] + step, np.minimum(n[of] - step, ROWS)], 1).astype(np.int32)
        back = np.ascontiguousarray(table[:, [1, 0, 2]])
        placed = [torch.from_numpy(x).to(device) for x in (table, back, expand(a, n), expand(b, n))]
        reach = int((a + n).max(initial=0)), int((b + n).max(initial=0))
        return Runs(placed[0], placed[1], placed[2], placed[3], reach, _apart(a, n))

    def reversed(self) -> Runs:
        """From target to source."""
        return Runs(
            self.back, self.table, self.target, self.source, self.reach[::-1], self.target_apart, self.source_apart
        )


def _apart(first: np.ndarray, rows: np.ndarray) -> bool:
    """Whether no row is in two runs."""
    order = np.argsort(first, kind="stable")
    return bool((first[order][1:] >= (first + rows)[order][:-1]).all())


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
    added to what is there, in fp32, and rounded once.

    Raises:
        ConfigError: the tensors do not go together, or a source row of the runs is in two of them: what it gets would
            depend on which comes last.
    """
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
    need(runs.target_apart, "a source row", "in two runs", "to scatter: runs whose sources lie apart")
    first = sources[0]
    need(runs.table.device == first.device, "the runs", f"on {runs.table.device}", f"on {first.device}")
    for x, y in zip(sources, targets, strict=True):
        need(min(x.dim(), y.dim()) >= 1, "a tensor", "a scalar", "[rows, ...]")
        need(x.shape[1:] == y.shape[1:], "a row's shape", f"{list(x.shape[1:])} and {list(y.shape[1:])}", "equal")
        for name, one, least in (("a tensor to read", x, runs.reach[0]), ("a tensor to write", y, runs.reach[1])):
            check_tensor(name, one, one.shape, None if add else one.dtype, first)
            need(len(one) >= least, f"{name}'s number of rows", len(one), f"{least} or more, as the runs name")
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

    width = [x[:1].numel() for x in sources]
    pairs = [(x, y, n) for x, y, n in zip(sources, targets, width, strict=True) if n]  # the kernel has widths of 0 last
    count, blocks = len(runs.table), sum(-(-n // COLUMNS) for _, _, n in pairs)
    if not count or not blocks:
        return
    more = MOST_TENSORS - len(pairs)
    xs, ys, wide = zip(*pairs, *[(*pairs[0][:2], 0)] * more, strict=True)
    with current(xs[0]):
        copy_spans_kernel[grid(count * blocks)](
            *xs, *ys, runs.table, count,
            WIDTH0=wide[0], WIDTH1=wide[1], WIDTH2=wide[2], ROWS=ROWS, COLUMNS=COLUMNS, ADD=add,
        )  # fmt: skip
