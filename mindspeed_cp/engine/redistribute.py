"""Redistributions between the layouts of the caller and the layouts in which attention is computed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.comm import Pending, RankRedistribution, Transport, rank_redistribution, start_redistributions
from mindspeed_cp.engine.recorder import POST, PartRecorder
from mindspeed_cp.plan import Plan


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


def redistribute(
    tensors: Sequence[Tensor],
    redistributions: Sequence[RankRedistribution | None],
    transport: Transport | None,
    label: str,
    tag: int = 0,
    recorder: PartRecorder | None = None,
) -> Generator[Sequence[Pending], None, list[Tensor]]:
    """Redistribute several tensors at once and return them. Tensors without a redistribution are returned unchanged.
    Yields once, after all transfers are posted.

    Raises:
        PeerError: a peer died or did not answer in time.
    """
    work = [(x, item) for x, item in zip(tensors, redistributions, strict=True) if item is not None]
    start = None if recorder is None else recorder.mark()
    in_flight = start_redistributions(work, transport, label, tag)
    posted = None if recorder is None else recorder.record_span(POST, start, None)
    yield in_flight.pending
    start = None if recorder is None else recorder.mark()
    outputs = iter(in_flight.finish())
    if recorder is not None:
        recorder.record_redistributed(posted, start, work)
    return [x if item is None else next(outputs) for x, item in zip(tensors, redistributions, strict=True)]
