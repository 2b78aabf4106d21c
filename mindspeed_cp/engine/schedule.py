"""Data of a rank's schedule: the point-to-point operations, exchanges and kernel calls of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_cp.ops.rows import RowIndex


@dataclass(frozen=True)
class P2POp:
    """One message of a program, as one of its two ends executes it.

    Attributes:
        number: identifies the message within the program.
        reduces: True for gradients (dK and dV), False for keys and values.
        sends: True if this rank is the sender.
        peer: rank at the other end.
        slot: slot of this rank that is read or written.
        rows: rows of the slot; a slice if they are contiguous.
        count: number of rows.
        label: description for error messages.
    """

    number: int
    reduces: bool
    sends: bool
    peer: int
    slot: int
    rows: RowIndex
    count: int
    label: str


@dataclass(frozen=True)
class ExchangeOp:
    """One exchange of all ranks, as one of them executes it.

    Attributes:
        number: identifies the exchange within the program, the same on all ranks.
        ops: the messages of this rank that travel in it; none if the rank only takes part.
        label: description for error messages.
    """

    number: int
    ops: Sequence[P2POp]
    label: str


@dataclass(frozen=True)
class RankStep:
    """Work of one rank in one step.

    Attributes:
        p2p_ops: operations of messages that start, in the order of the plan.
        compute: pairs of a slot and its kernel calls.
        wait_for: numbers of the messages to wait for at the end of the step, reduces first.
        exchanges: exchanges to post, which then carry all of `p2p_ops`; empty if messages travel by themselves.
        wait_for_exchanges: numbers of the exchanges to wait for at the end of the step.
        rows_read: where slots hold latents, the rows that the calls read of each slot in `compute`; only these are
            expanded, and calls count keys among them. Empty where slots hold keys and values.
    """

    p2p_ops: Sequence[P2POp]
    compute: Sequence[tuple[int, Sequence[Any]]]
    wait_for: Sequence[int]
    exchanges: Sequence[ExchangeOp] = ()
    wait_for_exchanges: Sequence[int] = ()
    rows_read: Mapping[int, RowIndex] = field(default_factory=dict)


@dataclass(frozen=True)
class RankSchedule:
    """Work of one rank in one direction.

    Attributes:
        steps: one entry per step of the program.
        capacity: number of rows of each slot.
        stores_all_rows: True if the first result of every query row is stored, not accumulated, so that accumulators
            need no initialization.
    """

    steps: Sequence[RankStep]
    capacity: Sequence[int]
    stores_all_rows: bool
