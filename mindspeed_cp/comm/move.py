"""Redistribution of tensors: all-to-all-v over rows and heads, posted at once and finished together.

Every rank sends to each other one tensor of just the rows and heads that the other wants: what NCCL and HCCL do inside
their all-to-all-v too. Rows that are one run, with all heads, are sent from where they lie and received where they
belong; anything else goes through one staging copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.comm.transport import Pending, Transfer, Transport, staging
from mindspeed_cp.layout import Redistribution, expand

Rows = slice | Tensor


@dataclass(frozen=True)
class Part:
    """What one rank exchanges with a peer, or keeps.

    Attributes:
        peer: the other rank.
        rows: of this rank's tensor; of its input, where it keeps the part.
        other_rows: of the other end's tensor; of this rank's output, where it keeps the part.
        count: how many rows.
        heads: of the tensor that has all heads: the input, in the adjoint the output.
    """

    peer: int
    rows: Rows
    other_rows: Rows
    count: int
    heads: slice


@dataclass(frozen=True)
class Move:
    """One rank's part of a redistribution, one way.

    Attributes:
        give, get: parts to send and to receive.
        keep: what stays, or None.
        shape: rows and heads of the output.
        adds: parts of the output may overlap, and are summed: the adjoint of a move that makes copies.
        adjoint: the move goes back: heads are cut from the output, not from the input.
    """

    give: Sequence[Part]
    get: Sequence[Part]
    keep: Part | None
    shape: tuple[int, int]
    adds: bool
    adjoint: bool


def move_of(
    redistribution: Redistribution,
    rank: int,
    device: torch.device,
    adjoint: bool = False,
    rows: np.ndarray | None = None,
) -> Move:
    """What one rank does in a redistribution, or in its adjoint; made once for a plan. Row numbers lie on `device`.

    Args:
        redistribution: from layout to layout.
        rank: whose part it is.
        device: of the tensors.
        adjoint: the way back.
        rows: the input has more rows than the redistribution's source: for each of the source's rows its number in the
            input. Not for the adjoint.
    """
    given, got = redistribution.of(rank, adjoint)
    here, there = ("dst_row", "src_row") if adjoint else ("src_row", "dst_row")
    heads = redistribution.heads
    low, high = redistribution.target.head_range(rank, heads)

    def part(item: np.ndarray, mine: str, other: str) -> Part:
        runs = redistribution.runs_of(item)
        peer = int(item["dst"] if item["src"] == rank else item["src"])
        first = int(item["head"])
        return Part(
            peer,
            rows_at(runs[mine], runs["rows"], device, rows if mine == "src_row" else None),
            rows_at(runs[other], runs["rows"], device),
            int(item["rows"]),
            slice(first, first + int(item["heads"])),
        )

    kept = redistribution.kept(rank)
    out = redistribution.source if adjoint else redistribution.target
    return Move(
        [part(item, here, there) for item in given],
        [part(item, there, here) for item in got],
        None if kept is None else part(kept, here, there),
        (int(out.token_counts[rank]), heads if adjoint else high - low),
        adjoint and redistribution.replicates,
        adjoint,
    )


def start_moves(
    work: Sequence[tuple[Tensor, Move]], transport: Transport | None, what: str, tag: int = 0
) -> Callable[[], list[Tensor]]:
    """Post several moves at once.

    Args:
        work: for each move this rank's input [rows, heads, dim], contiguous; dims and types may differ.
        transport: to the other ranks; None for one rank.
        what: for error messages.
        tag: the first of the moves' tags, the same on all ranks: as many follow as there are moves.

    Returns:
        A function that waits and returns the outputs [rows, heads, dim], of the types of the inputs; it raises
        PeerError when a peer died or does not answer.
    """
    transfers: list[Transfer] = []
    landings: list[Callable[[], None]] = []
    outputs = []
    for number, (x, move) in enumerate(work, tag):
        shape = (*move.shape, *x.shape[2:])
        out = x.new_zeros(shape) if move.adds else staging_of(x, shape)
        outputs.append(out)
        for part in move.give:
            name = f"{what}, {part.count} rows"
            transfers.append(Transfer(_cut(x, part, not move.adjoint), part.peer, True, number, name))
        for part in move.get:
            target, land = _landing(out, part, move)
            landings.append(land)
            transfers.append(Transfer(target, part.peer, False, number, f"{what}, {part.count} rows"))
        if move.keep is not None:
            _keep(x, out, move.keep, move)
    pending: Sequence[Pending] = []
    if transfers:
        assert transport is not None, "one rank keeps everything"
        pending = transport.post(transfers, with_all=True)

    def finish() -> list[Tensor]:
        for one in pending:
            one.wait()
        for land in landings:
            land()
        return outputs

    return finish


def staging_of(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A buffer of that shape, [rows, heads, dim]."""
    return staging(like[:0].new_empty((0, *shape[1:])), shape[0], like.dtype)


def rows_at(first: np.ndarray, count: np.ndarray, device: torch.device, of: np.ndarray | None = None) -> Rows:
    """Runs of rows, as a slice where they are one run, else as row numbers; with `of` those of the rows at these
    places in it."""
    if of is not None:
        first = of[expand(first, count)]
        count = np.ones_like(first)
    if not len(first):
        return slice(0, 0)
    if len(first) == 1 or (first[1:] == first[:-1] + count[:-1]).all():
        return slice(int(first[0]), int(first[0] + count.sum()))
    return torch.from_numpy(expand(first, count)).to(device)


def _cut(x: Tensor, part: Part, heads: bool) -> Tensor:
    """Rows and heads to send: in place when they are one piece of memory, else a copy."""
    x = x[:, part.heads] if heads else x
    if isinstance(part.rows, slice):
        found = x[part.rows]
        if found.is_contiguous():
            return found
        out = staging_of(x, tuple(found.shape))
        return out.copy_(found)
    out = staging_of(x, (part.count, *x.shape[1:]))
    return torch.index_select(x, 0, part.rows, out=out)


def _landing(out: Tensor, part: Part, move: Move) -> tuple[Tensor, Callable[[], None]]:
    """Where a part arrives, and what to do when it has."""
    view = out[:, part.heads] if move.adjoint else out
    rows = part.rows
    if isinstance(rows, slice) and not move.adds and view[rows].is_contiguous():
        return view[rows], _nothing
    buffer = staging_of(out, (part.count, *view.shape[1:]))
    return buffer, lambda: _put(view, rows, buffer, move.adds)


def _keep(x: Tensor, out: Tensor, part: Part, move: Move) -> None:
    given = x if move.adjoint else x[:, part.heads]
    taken = out[:, part.heads] if move.adjoint else out
    _put(taken, part.other_rows, given[part.rows], move.adds)


def _put(out: Tensor, rows: Rows, x: Tensor, adds: bool) -> None:
    if isinstance(rows, slice):
        out[rows].add_(x) if adds else out[rows].copy_(x)
    elif adds:
        out.index_add_(0, rows, x)
    else:
        out.index_copy_(0, rows, x)


def _nothing() -> None:
    """Arrived in place."""
