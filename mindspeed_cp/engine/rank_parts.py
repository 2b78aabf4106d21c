"""The parts of a plan on one rank. A plan without parts is one part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.comm import RankRedistribution, as_row_index, rank_redistribution
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.ops.rows import RowIndex, put_rows
from mindspeed_cp.plan import Plan, part_ends, part_rows

REDISTRIBUTION_TAGS = 4  # tags per part; at most three redistributions (q, k and v) are in flight at once


@dataclass(frozen=True)
class QkvRedistributions:
    """The redistributions of one rank; None between equal layouts.

    Attributes:
        q, kv: from the layout of the caller to the layout of the computation.
        q_adjoint, kv_adjoint: back to the layout of the caller.
        kv_has_copies: True if several ranks hold the same kv head, whose gradients are then summed on the way back.
    """

    q: RankRedistribution | None
    kv: RankRedistribution | None
    q_adjoint: RankRedistribution | None
    kv_adjoint: RankRedistribution | None
    kv_has_copies: bool


def qkv_redistributions(
    plan: Plan,
    rank: int,
    device: torch.device,
    rows: np.ndarray | None = None,
    kv_rows: np.ndarray | None = None,
) -> QkvRedistributions:
    """Return the redistributions of a rank, with row numbers on a device.

    Args:
        plan: a plan without parts.
        rank: context-parallel rank.
        device: device of the tensors.
        rows, kv_rows: if the tensors of the caller have other rows as well, the indices of the plan's rows among them.
    """
    q, kv = plan.q_redistribution, plan.kv_redistribution
    return QkvRedistributions(
        None if q is None else rank_redistribution(q, rank, device, rows=rows),
        None if kv is None else rank_redistribution(kv, rank, device, rows=kv_rows),
        None if q is None else rank_redistribution(q, rank, device, adjoint=True),
        None if kv is None else rank_redistribution(kv, rank, device, adjoint=True),
        kv is not None and kv.has_copies,
    )


@dataclass(frozen=True)
class RankPart:
    """One part of a plan on one rank. It is cached beside the plan and therefore does not refer to it.

    Attributes:
        redistributions: from the rows of the caller to the rows that this rank computes, and back.
        rows: the part's queries among the rows of the caller; None for all rows.
        kv_rows: the part's keys and values among the rows of the caller; None for all rows.
        tag: first tag of the part's messages. Parts have disjoint tags.
    """

    redistributions: QkvRedistributions
    rows: RowIndex | None
    kv_rows: RowIndex | None
    tag: int


@dataclass(frozen=True)
class RankParts:
    """All parts of a plan on one rank.

    Attributes:
        parts: the parts.
        step_order: by direction, the indices of the parts in the order in which they are resumed after their
            redistributions are posted: once for each step, and once more to finish.
    """

    parts: Sequence[RankPart]
    step_order: dict[str, Sequence[int]]


def build_rank_parts(plan: Plan, rank: int, device: torch.device) -> RankParts:
    """Build the parts of a rank, with row numbers on a device."""
    parts, tag = [], 0
    for index, part in enumerate(plan.parts_or_self):
        numbers, rows = _rows(plan, index, rank, False, device)
        kv_numbers, kv_rows = _rows(plan, index, rank, True, device)
        parts.append(RankPart(qkv_redistributions(part, rank, device, numbers, kv_numbers), rows, kv_rows, tag))
        messages = [m for program in (part.forward, part.backward) for m in (program.fetch, program.reduce)]
        tag += REDISTRIBUTION_TAGS + 4 * max(map(len, messages))
    return RankParts(parts, {direction: _step_order(plan, direction) for direction in ("forward", "backward")})


def _rows(
    plan: Plan, part: int, rank: int, keys: bool, device: torch.device
) -> tuple[np.ndarray | None, RowIndex | None]:
    """Return the rows of a part among the rows of the caller, as numbers and as an index; None for all rows."""
    if not plan.parts:
        return None, None
    first, count = part_rows(plan, part, rank, keys)
    layout = plan.kv_layout_in if keys else plan.layout
    if count.sum() == layout.token_counts[rank]:
        return None, None
    return ragged_arange(first, count), as_row_index(first, count, device)


def _step_order(plan: Plan, direction: str) -> Sequence[int]:
    ends, order = part_ends(plan, direction), []
    turns = plan.step_order(direction)
    for number, (part, _) in enumerate(turns):
        order += [part] * (1 + (ends[part] == number))
    return order + [part for part, end in enumerate(ends) if end == len(turns)]


def join_rows(parts: Sequence[tuple[Tensor, RowIndex | None]], count: int) -> Tensor:
    """Return the tensor of the caller with ``count`` rows, from each part's tensor and its rows in the result. The rows
    of the parts cover the result, each row once."""
    for x, rows in parts:
        if rows is None:
            return x
    out = parts[0][0].new_empty((count, *parts[0][0].shape[1:]))
    for x, rows in parts:
        assert rows is not None
        put_rows(out, rows, x)
    return out
