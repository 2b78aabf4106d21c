"""The parts of a plan as one rank runs them, or the whole of a plan without parts: rows, moves and turns.

Every part is a generator, which stands still where others have their turn: after its moves are posted, after each
step's computation, and after the moves of its results are posted.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.comm import Rows, rows_at
from mindspeed_cp.engine.moves import Moves, moves_of
from mindspeed_cp.layout import expand
from mindspeed_cp.plan import Plan, conclusions, rows_of

MOVES = 4  # tags of a part's moves: q, k and v at the most at once

Result = TypeVar("Result")


@dataclass(frozen=True)
class Piece:
    """One part as one rank runs it. It does not hold the plan, beside which it is kept.

    Attributes:
        moves: from the caller's rows to those where it is computed, and its results back to its own rows.
        rows: its queries among the caller's; None where they are all.
        kv_rows: its keys and values among the caller's; None where they are all.
        tag: the first tag of its messages; those of another part are others.
    """

    moves: Moves
    rows: Rows | None
    kv_rows: Rows | None
    tag: int


@dataclass(frozen=True)
class Pieces:
    """All parts of a plan on one rank.

    Attributes:
        all: the parts.
        turns: by direction the numbers of the parts in the order in which they go on, after their moves are posted:
            for every step, and once more to conclude.
    """

    all: Sequence[Piece]
    turns: dict[str, Sequence[int]]


_known: WeakKeyDictionary[Plan, dict[tuple[int, torch.device], Pieces]] = WeakKeyDictionary()
_lock = threading.Lock()


def pieces_of(plan: Plan, rank: int, device: torch.device) -> Pieces:
    """The parts on a rank with row numbers on a device, made at the first call and kept as long as the plan lives."""
    with _lock:
        mine = _known.setdefault(plan, {})
    if (rank, device) not in mine:
        mine[rank, device] = _make(plan, rank, device)
    return mine[rank, device]


def _make(plan: Plan, rank: int, device: torch.device) -> Pieces:
    found, tag = [], 0
    for number, part in enumerate(plan.pieces):
        rows = [_rows(plan, number, rank, keys, device) for keys in (False, True)]
        moves = moves_of(part, rank, device, rows[0][0], rows[1][0])
        found.append(Piece(moves, rows[0][1], rows[1][1], tag))
        messages = [m for program in (part.forward, part.backward) for m in (program.fetch, program.reduce)]
        tag += MOVES + 4 * max(map(len, messages))
    return Pieces(found, {direction: _turns(plan, direction) for direction in ("forward", "backward")})


def _rows(plan: Plan, part: int, rank: int, keys: bool, device: torch.device) -> tuple[np.ndarray | None, Rows | None]:
    """A part's rows as numbers, and as one takes them; None where they are all."""
    if not plan.parts:
        return None, None
    first, count = rows_of(plan, part, rank, keys)
    layout = plan.layout_kv if keys else plan.layout
    if count.sum() == layout.token_counts[rank]:
        return None, None
    return expand(first, count), rows_at(first, count, device)


def _turns(plan: Plan, direction: str) -> Sequence[int]:
    ends, found = conclusions(plan, direction), []
    for number, (part, _) in enumerate(plan.turns(direction)):
        found += [part] * (1 + (ends[part] == number))
    return found + [part for part, end in enumerate(ends) if end == len(plan.turns(direction))]


def take_turns(runs: Sequence[Generator[None, None, Result]], turns: Sequence[int]) -> list[Result]:
    """Run the generators of all parts to their ends, and return what they return."""
    if len(runs) == 1:
        try:
            while True:
                next(runs[0])
        except StopIteration as end:
            return [end.value]
    for run in runs:
        next(run)
    for number in turns:
        next(runs[number])
    return [_returned(run) for run in runs]


def _returned(run: Generator[None, None, Result]) -> Result:
    try:
        next(run)
    except StopIteration as end:
        found: Result = end.value
        return found
    raise AssertionError("a part has a turn left")


def take(x: Tensor, rows: Rows | None) -> Tensor:
    """A part's rows of a tensor of the caller's: a view where they are one run."""
    if rows is None:
        return x
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def join(parts: Sequence[tuple[Tensor, Rows | None]], count: int) -> Tensor:
    """The caller's tensor of `count` rows, from the parts' tensors and where their rows are in it; the parts' rows are
    all, each once."""
    for x, rows in parts:
        if rows is None:
            return x
    out = parts[0][0].new_empty((count, *parts[0][0].shape[1:]))
    for x, rows in parts:
        assert rows is not None
        if isinstance(rows, slice):
            out[rows] = x
        else:
            out.index_copy_(0, rows, x)
    return out
