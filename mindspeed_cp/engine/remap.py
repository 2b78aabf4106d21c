"""Hidden states between the layout of linear layers and that of attention, under autograd."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.comm import Move, Transport, move_of
from mindspeed_cp.engine.clock import Track, new_call, track_of
from mindspeed_cp.engine.moves import move_all
from mindspeed_cp.engine.pieces import take_turns
from mindspeed_cp.layout import Redistribution, in_shares
from mindspeed_cp.plan import Plan


@dataclass(frozen=True)
class Remap:
    """One rank's moves between `plan.linear` and `plan.layout`.

    Attributes:
        there: from linear layers to attention.
        back: from attention to linear layers.
    """

    there: Move
    back: Move

    @property
    def turned(self) -> Remap:
        """The other way round."""
        return Remap(self.back, self.there)


_known: WeakKeyDictionary[Plan, dict[tuple[int, torch.device, int, int], Remap]] = WeakKeyDictionary()
_redistributions: WeakKeyDictionary[Plan, dict[tuple[int, int], Redistribution]] = WeakKeyDictionary()
_lock = threading.Lock()


def remap_of(plan: Plan, rank: int, device: torch.device, shares: int = 1, multiple: int = 1) -> Remap:
    """The moves of a rank with row numbers on a device, made at the first call and kept as long as the plan lives.

    Args:
        plan: with a linear layout.
        rank: in the context-parallel group; of shares, context-parallel rank * shares + tensor-parallel rank.
        device: of the tensors.
        shares: ranks that share the rows of a context-parallel rank (sequence parallelism).
        multiple: what padded rows are a multiple of, see :func:`mindspeed_cp.layout.in_shares`.
    """
    assert plan.linear is not None
    with _lock:
        mine = _known.setdefault(plan, {})
        moves = _redistributions.setdefault(plan, {})
    cut = shares, multiple if shares > 1 else 1
    if cut not in moves:
        linear, layout = (x if shares == 1 else in_shares(x, *cut) for x in (plan.linear, plan.layout))
        moves[cut] = Redistribution(linear, layout, 1)
    key = rank, device, *cut
    if key not in mine:
        mine[key] = Remap(move_of(moves[cut], rank, device), move_of(moves[cut], rank, device, adjoint=True))
    return mine[key]


def remapped(x: Tensor, remap: Remap, transport: Transport | None, what: str = "hidden states") -> Tensor:
    """Rows of linear layers as rows of attention, or with `remap.turned` the reverse. Gradients go the other way.

    Every rank of the group calls it, and runs its backward, ranks without rows too.

    Args:
        x: this rank's rows [rows, ...].
        remap: of this rank.
        transport: to the other ranks.
        what: for error messages.

    Returns:
        [rows, ...] after the move.

    Raises:
        PeerError: a peer died or did not answer in time.
    """
    out: Tensor = _Remapped.apply(x, remap, transport, what)
    return out


class _Remapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, remap: Remap, transport: Transport | None, what: str) -> Tensor:
        call = new_call()
        ctx.how = remap, transport, what, call
        return _moved(x, remap.there, transport, what, track_of(call, "forward", moves="remap"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        remap, transport, what, call = ctx.how
        track = track_of(call, "backward", moves="remap")
        return _moved(gradient, remap.back, transport, f"gradients of {what}", track), None, None, None


def _moved(x: Tensor, move: Move, transport: Transport | None, what: str, track: Track | None) -> Tensor:
    rows = x.flatten(1).unsqueeze(1).contiguous()
    ((out,),) = take_turns([move_all((rows,), (move,), transport, what, track=track)], ())
    return out.reshape(len(out), *x.shape[1:])
