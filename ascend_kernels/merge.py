"""Parts of a result brought together in one launch: outputs merged by their lse, gradients added.

A part has some rows of a tensor: a run of them, or those that a table names. The two functions are torch operators,
`mindspeed_cp::merge_parts` and `mindspeed_cp::sum_parts`, so that profiles show them by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import (
    check_memory,
    device_guard,
    implementation_for,
    launch_grid,
    next_power_of_2,
)

#: Elements of the result that one program holds.
PROGRAM_ELEMENTS = 2048

#: Maximum number of parts of a launch.
MAX_PARTS = 4

_library = torch.library.Library("mindspeed_cp", "DEF")
_PARTS = "Tensor?[] tables, int[] firsts"
_library.define(
    f"merge_parts(Tensor? out, Tensor? lse, Tensor[] parts, Tensor[] part_lse, {_PARTS}, Tensor(a!) result, "
    "Tensor(b!) result_lse, str? implementation) -> ()"
)
_library.define(f"sum_parts(Tensor? total, Tensor[] parts, {_PARTS}, Tensor(a!) result, str? implementation) -> ()")


def merge_parts(
    total: tuple[Tensor, Tensor] | None,
    parts: Sequence[Tensor],
    part_lse: Sequence[Tensor],
    tables: Sequence[Tensor | None],
    firsts: Sequence[int],
    result: tuple[Tensor, Tensor],
    implementation: str | None = None,
) -> None:
    """Merge partial results over disjoint keys.

    With weights w_p = exp(lse_p) / sum of exp(lse_p) over the total and all parts that have a row, out becomes the sum
    of w_p out_p and lse the log of that sum (online softmax: Milakov and Gimelshein 2018). Rows without a visible key
    have lse -inf; their out is ignored and may hold anything. A row without any key gets out 0 and lse -inf.

    Args:
        total: out [t, heads, dim] and lse fp32 [t, heads] so far; None: nothing.
        parts: 1 to MAX_PARTS tensors [rows, heads, dim].
        part_lse: fp32 [rows, heads] of each.
        tables: of each, int32 [t], the part's row for each row of the result, or -1; None: a run.
        firsts: of each that is a run, the row of the result that its first row belongs to; 0 with a table.
        result: out and lse to write, of the shapes of the total, which they may be; out of any floating type.
        implementation: see :func:`implementation_for`.

    Raises:
        ConfigError: a tensor is not contiguous, or on another device.
    """
    out, lse = result
    check_memory(**_named(total=total, part=parts, part_lse=part_lse, table=tables, result=result))
    old = (None, None) if total is None else total
    torch.ops.mindspeed_cp.merge_parts(*old, parts, part_lse, tables, firsts, out, lse, implementation)


def sum_parts(
    total: Tensor | None,
    parts: Sequence[Tensor],
    tables: Sequence[Tensor | None],
    firsts: Sequence[int],
    result: Tensor,
    implementation: str | None = None,
) -> None:
    """Add parts in fp32, always in the same order, and round once.

    Args:
        total: [t, heads, dim], sum so far; None: 0.
        parts, tables, firsts, implementation: as for :func:`merge_parts`.
        result: [t, heads, dim] of any floating type, is written; may be the total.

    Raises:
        ConfigError: a tensor is not contiguous, or on another device.
    """
    check_memory(**_named(total=[total], part=parts, table=tables, result=[result]))
    torch.ops.mindspeed_cp.sum_parts(total, parts, tables, firsts, result, implementation)


def _named(**groups: Sequence[Tensor | None] | None) -> dict[str, Tensor | None]:
    """Return tensors with the name of their group and their number there."""
    return {f"{name}[{i}]": x for name, group in groups.items() for i, x in enumerate(group or ())}


@torch.library.impl(_library, "merge_parts", "CompositeExplicitAutograd")
def _merge_parts(
    out: Tensor | None,
    lse: Tensor | None,
    parts: list[Tensor],
    part_lse: list[Tensor],
    tables: list[Tensor | None],
    firsts: list[int],
    result: Tensor,
    result_lse: Tensor,
    implementation: str | None,
) -> None:
    if implementation_for(result, implementation) == "triton":
        from mindspeed_cp.ascend_kernels.device.merge import merge_kernel

        lses = part_lse + [result_lse] * (MAX_PARTS - len(part_lse))
        old = (result, result_lse) if out is None else (out, lse)
        _launch(merge_kernel, out is not None, (*old, result, result_lse), parts, lses, tables, firsts, result)
        return
    total = result if result.dtype == torch.float32 else torch.empty_like(result, dtype=torch.float32)
    if out is None or lse is None:
        total.zero_()
        result_lse.fill_(float("-inf"))
    elif out.data_ptr() != total.data_ptr():
        total.copy_(out)
        result_lse.copy_(lse)
    for part, its_lse, table, first in zip(parts, part_lse, tables, firsts, strict=True):
        if table is None:
            rows = slice(first, first + len(part))
            _merge(total[rows], result_lse[rows], part, its_lse)
            continue
        target = (table >= 0).nonzero()[:, 0]
        source = table[target]
        merged = total[target], result_lse[target]
        _merge(*merged, part[source], its_lse[source])
        total[target], result_lse[target] = merged
    if total is not result:
        result.copy_(total)


@torch.library.impl(_library, "sum_parts", "CompositeExplicitAutograd")
def _sum_parts(
    total: Tensor | None,
    parts: list[Tensor],
    tables: list[Tensor | None],
    firsts: list[int],
    result: Tensor,
    implementation: str | None,
) -> None:
    if implementation_for(result, implementation) == "triton":
        from mindspeed_cp.ascend_kernels.device.merge import sum_kernel

        old = result if total is None else total
        _launch(sum_kernel, total is not None, (old, result), parts, [], tables, firsts, result)
        return
    new = result if result.dtype == torch.float32 else torch.empty_like(result, dtype=torch.float32)
    if total is None:
        new.zero_()
    elif total.data_ptr() != new.data_ptr():
        new.copy_(total)
    for part, table, first in zip(parts, tables, firsts, strict=True):
        if table is None:
            new[first : first + len(part)].add_(part)
        else:
            target = (table >= 0).nonzero()[:, 0]
            new.index_add_(0, target, part[table[target]].float())
    if new is not result:
        result.copy_(new)


@torch.library.impl(_library, "merge_parts", "Meta")
@torch.library.impl(_library, "sum_parts", "Meta")
def _write_nothing(*tensors_without_storage: object) -> None:
    """Do nothing: the results have their shapes before they are written."""


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge one part in torch."""
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(nan=0.0).unsqueeze(-1)
    empty = part_lse.unsqueeze(-1) == float("-inf")
    out.masked_fill_((lse == float("-inf")).unsqueeze(-1), 0.0)
    out.lerp_(part.to(out.dtype).masked_fill(empty, 0.0), weight)
    torch.logaddexp(lse, part_lse, out=lse)


def _launch(
    kernel: object,
    has_total: bool,
    first_arguments: Sequence[Tensor | None],
    parts: list[Tensor],
    lses: list[Tensor],
    tables: list[Tensor | None],
    firsts: list[int],
    result: Tensor,
) -> None:
    tokens, heads, dim = result.shape
    rows, missing = tokens * heads, MAX_PARTS - len(parts)
    if not rows:
        return
    width = max(1, next_power_of_2(dim))
    block = max(1, PROGRAM_ELEMENTS // width)
    blocks = -(-rows // block)
    with device_guard(result):
        kernel[launch_grid(blocks)](  # type: ignore[index]  # triton has no annotations
            *first_arguments, *parts, *[result] * missing, *lses,
            *(result if table is None else table for table in tables), *[result] * missing,
            *firsts, *[0] * missing, *map(len, parts), *[0] * missing, rows, blocks,
            HAS_TOTAL=has_total, PARTS=len(parts), TABLES=sum((x is not None) << i for i, x in enumerate(tables)),
            HEADS=heads, DIM=dim, WIDTH=width, BLOCK=block,
        )  # fmt: skip
