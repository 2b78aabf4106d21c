"""Tensors between the caller's layouts and those where attention is computed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mindspeed_cp.comm import Move, Transport, move_of, start_moves
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


_known: WeakKeyDictionary[Plan, dict[tuple[int, torch.device], Moves]] = WeakKeyDictionary()
_lock = threading.Lock()


def moves_of(plan: Plan, rank: int, device: torch.device) -> Moves:
    """The moves of a rank with row numbers on a device, made at the first call and kept as long as the plan lives."""
    with _lock:
        mine = _known.setdefault(plan, {})
    if (rank, device) not in mine:
        q, kv = plan.q_move, plan.kv_move
        mine[rank, device] = Moves(
            None if q is None else move_of(q, rank, device),
            None if kv is None else move_of(kv, rank, device),
            None if q is None else move_of(q, rank, device, adjoint=True),
            None if kv is None else move_of(kv, rank, device, adjoint=True),
            kv is not None and kv.replicates,
        )
    return mine[rank, device]


def move_all(
    tensors: Sequence[Tensor], moves: Sequence[Move | None], transport: Transport | None, what: str
) -> list[Tensor]:
    """The tensors after their moves, all under way at once; those without a move as they are.

    Raises:
        PeerError: a peer died or did not answer in time.
    """
    work = [(x, move) for x, move in zip(tensors, moves, strict=True) if move is not None]
    if not work:
        return list(tensors)
    moved = iter(start_moves(work, transport, what)())
    return [x if move is None else next(moved) for x, move in zip(tensors, moves, strict=True)]
