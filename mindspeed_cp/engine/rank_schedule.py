"""The schedule of one rank: what it posts, computes and waits for in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mindspeed_cp.comm import as_row_index
from mindspeed_cp.ops.attention import AttentionBackend
from mindspeed_cp.ops.rows import RowIndex
from mindspeed_cp.plan import Messages, Plan, Program
from mindspeed_cp.plan.tiles import number_keys_read


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
        due: step that waits for the message.
    """

    number: int
    reduces: bool
    sends: bool
    peer: int
    slot: int
    rows: RowIndex
    count: int
    label: str
    due: int


@dataclass(frozen=True)
class RankStep:
    """Work of one rank in one step.

    Attributes:
        p2p_ops: operations of messages that start, in the order of the plan.
        compute: pairs of a slot and its kernel calls.
        wait_for: numbers of the messages to wait for at the end of the step, reduces first.
        rows_read: where slots hold latents, the rows that the calls read of each slot in `compute`; only these are
            expanded, and calls count keys among them. Empty where slots hold keys and values.
    """

    p2p_ops: Sequence[P2POp]
    compute: Sequence[tuple[int, Sequence[Any]]]
    wait_for: Sequence[int]
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


def build_rank_schedule(
    plan: Plan,
    rank: int,
    direction: str,
    backend: AttentionBackend,
    dtype: torch.dtype,
    with_dropout: bool,
    device: torch.device,
) -> RankSchedule:
    """Build the schedule of a rank.

    Args:
        plan: a plan without parts.
        rank: context-parallel rank.
        direction: "forward" or "backward".
        backend: backend that lowers the tiles.
        dtype: type of q, k and v, on which the lowering depends.
        with_dropout: True if attention weights are dropped; False lowers the tiles as for dropout 0.
        device: device of the tensors and of the row numbers.
    """
    program: Program = getattr(plan, direction)
    tiles, rows = program.tiles(rank), int(plan.q_layout_compute.token_counts[rank])
    rows_read: dict[tuple[int, int], RowIndex] = {}
    if plan.attention.latent is not None:
        tiles, runs_read = number_keys_read(tiles)
        rows_read = {where: as_row_index(first, count, device) for where, (first, count) in runs_read.items()}
    attention = plan.attention if with_dropout else replace(plan.attention, dropout=0.0)
    lowered = backend.lower(direction, tiles, rows, attention, dtype)
    slots = range(program.capacity.shape[1])
    p2p_ops, wait_for = _p2p_ops(program, rank, device)
    steps = [
        RankStep(
            p2p_ops[s],
            [(slot, lowered[s, slot]) for slot in slots if (s, slot) in lowered],
            wait_for[s],
            rows_read={slot: rows_read[s, slot] for slot in slots if (s, slot) in rows_read},
        )
        for s in range(program.steps)
    ]
    return RankSchedule(steps, program.capacity[rank].tolist(), stores_all_rows(tiles, rows))


def stores_all_rows(tiles: np.ndarray, rows: int) -> bool:
    """Return True if every query row is in some tile, and every tile finds its rows either all unwritten or all
    written. The first result of every row is then stored, and the initial content of its memory does not matter."""
    written = np.zeros(rows, bool)
    remaining = rows
    for first, count in zip(tiles["q_row"].tolist(), tiles["q_rows"].tolist(), strict=True):
        if not remaining:
            break
        already_written = int(np.count_nonzero(written[first : first + count]))
        if already_written not in (0, count):
            return False
        written[first : first + count] = True
        remaining -= count - already_written
    return not remaining


def _p2p_ops(program: Program, rank: int, device: torch.device) -> tuple[list[list[P2POp]], list[list[int]]]:
    """Return, for each step, the operations to post and the numbers of the messages to wait for."""
    p2p_ops: list[list[P2POp]] = [[] for _ in range(program.steps)]
    wait_for: list[list[int]] = [[] for _ in range(program.steps)]
    for kind, messages in (("reduce", program.reduce), ("fetch", program.fetch)):
        contiguous = {side: messages.is_contiguous(side) for side in ("src", "dst")}
        for index in messages.involving(rank).tolist():
            op = _p2p_op(messages, index, kind, rank, contiguous, device)
            p2p_ops[int(messages.items["start"][index])].append(op)
            wait_for[int(messages.items["done"][index])].append(op.number)
    return p2p_ops, wait_for


def _p2p_op(
    messages: Messages, index: int, kind: str, rank: int, contiguous: Mapping[str, np.ndarray], device: torch.device
) -> P2POp:
    item = messages.items[index]
    sends = bool(item["src"] == rank)
    own_end, peer_end = ("src", "dst") if sends else ("dst", "src")
    if contiguous[own_end][index]:
        first = int(messages.runs_of(index)[own_end + "_row"][0])
        rows: RowIndex = slice(first, first + int(item["rows"]))
    else:
        rows = torch.from_numpy(messages.rows_of(index)[0 if sends else 1]).to(device)
    return P2POp(
        number=2 * index + (kind == "reduce"),
        reduces=kind == "reduce",
        sends=sends,
        peer=int(item[peer_end]),
        slot=int(item[own_end + "_slot"]),
        rows=rows,
        count=int(item["rows"]),
        label=f"{'dK and dV' if kind == 'reduce' else 'K and V'}, step {item['start']}, {item['rows']} rows",
        due=int(item["done"]),
    )
