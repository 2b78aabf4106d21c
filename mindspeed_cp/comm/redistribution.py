"""Redistribution of tensors between layouts: all-to-all-v over rows and heads, in two phases (post, then finish).

Every rank sends each peer one message with the rows and heads that the peer needs, as NCCL and HCCL do inside their
all-to-all-v. Few rows of several tensors for one peer, as of q, k and v, are packed into one message
(:func:`mindspeed_cp.layout.redistribution.is_one_message`). Of a single tensor, contiguous rows with all heads are sent
and received in place; other rows pass through a staging copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.comm.group_transport import Pending, Transfer, Transport, staging_buffer
from mindspeed_cp.layout import Redistribution, ragged_arange
from mindspeed_cp.layout.redistribution import is_one_message
from mindspeed_cp.ops.rows import RowIndex, add_rows, put_rows, take_rows


@dataclass(frozen=True)
class PeerRows:
    """Rows and heads that a rank exchanges with one peer, or keeps.

    Attributes:
        peer: rank at the other end.
        rows: rows of this rank's tensor; of its input, if the rank keeps them.
        peer_rows: rows of the peer's tensor; of this rank's output, if the rank keeps them.
        count: number of rows.
        heads: heads of the tensor that has all heads: the input, or the output of an adjoint.
    """

    peer: int
    rows: RowIndex
    peer_rows: RowIndex
    count: int
    heads: slice


@dataclass(frozen=True)
class RankRedistribution:
    """The sends and receives of one rank in a redistribution, in one direction.

    Attributes:
        to_send, to_receive: rows exchanged with each peer.
        local: rows that stay on this rank, or None.
        out_shape: rows and heads of the output.
        accumulates: True if received rows may overlap and are summed: the adjoint of a redistribution that copies
            heads.
        adjoint: True for the reverse direction, in which the output, not the input, is cut into heads.
    """

    to_send: Sequence[PeerRows]
    to_receive: Sequence[PeerRows]
    local: PeerRows | None
    out_shape: tuple[int, int]
    accumulates: bool
    adjoint: bool


def rank_redistribution(
    redistribution: Redistribution,
    rank: int,
    device: torch.device,
    adjoint: bool = False,
    rows: np.ndarray | None = None,
) -> RankRedistribution:
    """Return what one rank does in a redistribution or its adjoint. Compute it once per plan.

    Args:
        redistribution: the redistribution between two layouts.
        rank: context-parallel rank.
        device: device of the tensors and of the row numbers.
        adjoint: return the reverse direction.
        rows: if the input tensor has more rows than the source layout, the index in the input of each source row. Not
            supported for the adjoint.
    """
    sent, received = redistribution.sends_and_receives(rank, adjoint)
    own_side, peer_side = ("dst_row", "src_row") if adjoint else ("src_row", "dst_row")
    heads = redistribution.heads
    low, high = redistribution.target.head_range(rank, heads)

    def peer_rows(item: np.ndarray, side: str, other_side: str) -> PeerRows:
        runs = redistribution.runs_of(item)
        first_head = int(item["head"])
        return PeerRows(
            int(item["dst"] if item["src"] == rank else item["src"]),
            as_row_index(runs[side], runs["rows"], device, rows if side == "src_row" else None),
            as_row_index(runs[other_side], runs["rows"], device),
            int(item["rows"]),
            slice(first_head, first_head + int(item["heads"])),
        )

    kept = redistribution.local_pair(rank)
    out_layout = redistribution.source if adjoint else redistribution.target
    return RankRedistribution(
        [peer_rows(item, own_side, peer_side) for item in sent],
        [peer_rows(item, peer_side, own_side) for item in received],
        None if kept is None else peer_rows(kept, own_side, peer_side),
        (int(out_layout.token_counts[rank]), heads if adjoint else high - low),
        adjoint and redistribution.has_copies,
        adjoint,
    )


class RedistributionsInFlight:
    """Redistributions that have been posted.

    Attributes:
        pending: their transfers.
    """

    def __init__(
        self, outputs: list[Tensor], pending: Sequence[Pending], unpackers: Sequence[Callable[[], None]]
    ) -> None:
        self.pending = pending
        self._outputs, self._unpackers = outputs, unpackers

    def finish(self) -> list[Tensor]:
        """Wait for the transfers and return the outputs [rows, heads, dim], of the types of the inputs.

        Raises:
            PeerError: a peer died or did not answer in time.
        """
        for transfer in self.pending:
            transfer.wait()
        for unpack in self._unpackers:
            unpack()
        return self._outputs


def start_redistributions(
    work: Sequence[tuple[Tensor, RankRedistribution]], transport: Transport | None, label: str, tag: int = 0
) -> RedistributionsInFlight:
    """Post several redistributions at once. What goes to one peer is one message, if it is small.

    Args:
        work: for each redistribution, the contiguous input of this rank [rows, heads, dim]; dims and types may differ.
        transport: transport to the other ranks; None for a single rank.
        label: description for error messages.
        tag: tag of the first redistribution, the same on all ranks; the others use the following numbers.

    Raises:
        PeerError: a peer is known to be gone.
    """
    outputs = []
    messages: dict[tuple[int, bool], list[_Piece]] = {}  # by peer and direction
    for number, (x, redistribution) in enumerate(work, tag):
        shape = (*redistribution.out_shape, *x.shape[2:])
        out = x.new_zeros(shape) if redistribution.accumulates else x.new_empty(shape)
        outputs.append(out)
        for part in redistribution.to_send:
            view = x if redistribution.adjoint else x[:, part.heads]
            piece = _Piece(number, view, part.rows, part.count, False)
            messages.setdefault((part.peer, True), []).append(piece)
        for part in redistribution.to_receive:
            view = out[:, part.heads] if redistribution.adjoint else out
            piece = _Piece(number, view, part.rows, part.count, redistribution.accumulates)
            messages.setdefault((part.peer, False), []).append(piece)
        if redistribution.local is not None:
            _copy_local(x, out, redistribution.local, redistribution)
    transfers: list[Transfer] = []
    unpackers: list[Callable[[], None]] = []
    for (peer, sends), together in messages.items():
        is_packed = is_one_message([piece.bytes for piece in together])
        for pieces in [together] if is_packed else [[piece] for piece in together]:
            if sends:
                buffer = _send_buffer(pieces)
            else:
                buffer, unpack = _receive_buffer(pieces)
                if unpack is not None:
                    unpackers.append(unpack)
            rows = max(piece.count for piece in pieces)
            transfers.append(Transfer(buffer, peer, sends, pieces[0].tag, f"{label}, {rows} rows"))
    if not transfers:
        return RedistributionsInFlight(outputs, (), unpackers)
    assert transport is not None, "a single rank keeps all rows"
    return RedistributionsInFlight(outputs, transport.post(transfers, all_to_all=True), unpackers)


def as_row_index(
    first: np.ndarray, count: np.ndarray, device: torch.device, numbers: np.ndarray | None = None
) -> RowIndex:
    """Convert runs of rows to a slice if they are contiguous, else to row numbers on a device. With ``numbers``, runs
    are positions in this array of row numbers."""
    if numbers is not None:
        first = numbers[ragged_arange(first, count)]
        count = np.ones_like(first)
    if not len(first):
        return slice(0, 0)
    if len(first) == 1 or (first[1:] == first[:-1] + count[:-1]).all():
        return slice(int(first[0]), int(first[0] + count.sum()))
    return torch.from_numpy(ragged_arange(first, count)).to(device)


@dataclass(frozen=True)
class _Piece:
    """Rows of one tensor in a message.

    Attributes:
        tag: tag of its redistribution.
        tensor: the tensor, with those heads alone that travel.
        rows: which of its rows, `count` of them.
        accumulates: received rows are added to it.
    """

    tag: int
    tensor: Tensor
    rows: RowIndex
    count: int
    accumulates: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, heads and channels."""
        return self.count, *self.tensor.shape[1:]

    @property
    def bytes(self) -> int:
        """Bytes of the rows."""
        return prod(self.shape) * self.tensor.element_size()

    def unpack(self, values: Tensor) -> None:
        """Set the rows, or add to them."""
        (add_rows if self.accumulates else put_rows)(self.tensor, self.rows, values)


def _send_buffer(pieces: Sequence[_Piece]) -> Tensor:
    """Return what to send: a view of a single tensor if it is contiguous in memory, else a copy."""
    if len(pieces) == 1:
        return take_rows(pieces[0].tensor, pieces[0].rows).contiguous()
    buffer, views = _packed(pieces)
    for piece, view in zip(pieces, views, strict=True):
        if isinstance(piece.rows, slice):
            view.copy_(piece.tensor[piece.rows])
        else:
            torch.index_select(piece.tensor, 0, piece.rows, out=view)
    return buffer


def _receive_buffer(pieces: Sequence[_Piece]) -> tuple[Tensor, Callable[[], None] | None]:
    """Return where a message arrives, and the function that unpacks it; None if it arrives in place."""
    if len(pieces) > 1:
        buffer, views = _packed(pieces)

        def unpack() -> None:
            for piece, view in zip(pieces, views, strict=True):
                piece.unpack(view)

        return buffer, unpack
    (piece,) = pieces
    if isinstance(piece.rows, slice) and not piece.accumulates and piece.tensor[piece.rows].is_contiguous():
        return piece.tensor[piece.rows], None
    buffer = staging_buffer(piece.tensor, piece.count)
    return buffer, lambda: piece.unpack(buffer)


def _packed(pieces: Sequence[_Piece]) -> tuple[Tensor, list[Tensor]]:
    """Allocate a message and return it with the view of each piece in it. A message of several types has bytes; pieces
    of larger elements come first, so that each begins at a multiple of its element's size."""
    types = {piece.tensor.dtype for piece in pieces}
    dtype = types.pop() if len(types) == 1 else torch.uint8
    sizes = [piece.bytes // dtype.itemsize for piece in pieces]
    buffer = torch.empty(sum(sizes), dtype=dtype, device=pieces[0].tensor.device)
    views, end = {}, 0
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].tensor.element_size()):
        begin, end = end, end + sizes[i]
        views[i] = buffer[begin:end].view(pieces[i].tensor.dtype).view(pieces[i].shape)
    return buffer, [views[i] for i in range(len(pieces))]


def _copy_local(x: Tensor, out: Tensor, part: PeerRows, redistribution: RankRedistribution) -> None:
    source = x if redistribution.adjoint else x[:, part.heads]
    target = out[:, part.heads] if redistribution.adjoint else out
    (add_rows if redistribution.accumulates else put_rows)(target, part.peer_rows, take_rows(source, part.rows))
