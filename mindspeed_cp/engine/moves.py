"""Tensors between the caller's layouts and those where attention is computed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.comm import Move, Transport, move_of, start_moves
from mindspeed_cp.engine.clock import POST, Track
from mindspeed_cp.plan import Plan


@dataclass(frozen=True)
class Moves:
    """One rank's moves; None where the layouts are the same.

    Attributes:
        q, kv: to where attention is computed.
        q_back, kv_back: back to the caller.
        kv_copies: a kv head is on several ranks, so its gradients are summed on the way back.
    """

    q: Move | None
    kv: Move | None
    q_back: Move | None
    kv_back: Move | None
    kv_copies: bool


def moves_of(
    plan: Plan,
    rank: int,
    device: torch.device,
    rows: np.ndarray | None = None,
    kv_rows: np.ndarray | None = None,
) -> Moves:
    """The moves of a rank with row numbers on a device.

    Args:
        plan: a plan without parts.
        rank: context-parallel rank.
        device: of the tensors.
        rows, kv_rows: the caller's tensors have other rows as well: numbers of this plan's among them.
    """
    q, kv = plan.q_move, plan.kv_move
    return Moves(
        None if q is None else move_of(q, rank, device, rows=rows),
        None if kv is None else move_of(kv, rank, device, rows=kv_rows),
        None if q is None else move_of(q, rank, device, adjoint=True),
        None if kv is None else move_of(kv, rank, device, adjoint=True),
        kv is not None and kv.replicates,
    )


def move_all(
    tensors: Sequence[Tensor],
    moves: Sequence[Move | None],
    transport: Transport | None,
    what: str,
    tag: int = 0,
    track: Track | None = None,
) -> Generator[None, None, list[Tensor]]:
    """The tensors after their moves, all under way at once; those without a move as they are. Yields once, when they
    are under way, and returns them. `track` is told of messages and waits.

    Raises:
        PeerError: a peer died or did not answer in time.
    """
    work = [(x, move) for x, move in zip(tensors, moves, strict=True) if move is not None]
    began = None if track is None else track.mark()
    finish = start_moves(work, transport, what, tag) if work else None
    posted = None if track is None else track.lap(POST, began, None)
    yield
    began = None if track is None else track.mark()
    moved = iter(() if finish is None else finish())
    if track is not None:
        track.moved(posted, began, work)
    return [x if move is None else next(moved) for x, move in zip(tensors, moves, strict=True)]
