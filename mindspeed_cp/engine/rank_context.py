"""Context that all calls of a plan share on one rank: checked once, cached beside the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.comm.group_transport import GroupTransport, checked_timeout
from mindspeed_cp.comm.groups import group_rank, group_size
from mindspeed_cp.comm.redistribution import RankRedistribution, as_row_index, rank_redistribution
from mindspeed_cp.engine.agreement import CallAgreement, plan_digest
from mindspeed_cp.engine.plan_cache import kept_with_plan
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.ops.attention.backends import backend_for_device
from mindspeed_cp.ops.attention.contract import AttentionBackend, Heads
from mindspeed_cp.ops.rows import RowIndex, put_rows
from mindspeed_cp.plan import AttentionConfig, Messages, Plan, Program, part_ends, part_rows
from mindspeed_cp.plan.tiles import number_keys_read

REDISTRIBUTION_TAGS = 4  # tags per part; at most three redistributions (q, k and v) are in flight at once


class RankContext:
    """One rank of a plan, for one backend, type and device. It is cached beside the plan and does not refer to it.

    Attributes:
        rank: context-parallel rank.
        shapes: of q, k and v, by name.
        parts: parts of the plan on this rank; a plan without parts is one part.
        step_order: by direction, the indices of the parts in the order in which they are resumed after their
            redistributions are posted: once for each step, and once more to finish.
    """

    def __init__(self, plan: Plan, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        attention = plan.attention
        self.rank, self._dtype, self._device = rank, dtype, device
        rows, kv_rows = (int(layout.token_counts[rank]) for layout in (plan.layout, plan.kv_layout_in))
        self.shapes = {
            "q": (rows, attention.heads, attention.head_dim),
            "k": (kv_rows, attention.kv_row.heads, attention.kv_row.dim),
            "v": (kv_rows, attention.kv_row.heads, attention.kv_row.dim_v),
        }
        self.parts = build_rank_parts(plan, rank, device)
        self.step_order = {direction: _step_order(plan, direction) for direction in ("forward", "backward")}
        self._schedules: dict[tuple[str, bool], Sequence[RankSchedule]] = {}

    def schedules(
        self, plan: Plan, backend: AttentionBackend, direction: str, with_dropout: bool
    ) -> Sequence[RankSchedule]:
        """Return the schedule of each part in one direction; the first call builds them."""
        schedules = self._schedules.get((direction, with_dropout))
        if schedules is None:
            schedules = self._schedules[direction, with_dropout] = [
                build_rank_schedule(part, self.rank, direction, backend, self._dtype, with_dropout, self._device)
                for part in plan.parts_or_self
            ]
        return schedules


@dataclass(frozen=True)
class RankPart:
    """One part of a plan on one rank. It is cached beside the plan and therefore does not refer to it.

    Attributes:
        attention, heads: its attention, and the heads that this rank computes.
        q, kv: redistributions from the layout of the caller to the layout of the computation; None between equal ones.
        q_adjoint, kv_adjoint: back to the layout of the caller.
        kv_has_copies: True if several ranks hold the same kv head, whose gradients are then summed on the way back.
        rows, kv_rows: the part's queries, and its keys and values, among the rows of the caller; None for all rows.
        tag: first tag of the part's messages. Parts have disjoint tags.
    """

    attention: AttentionConfig
    heads: Heads
    q: RankRedistribution | None
    kv: RankRedistribution | None
    q_adjoint: RankRedistribution | None
    kv_adjoint: RankRedistribution | None
    kv_has_copies: bool
    rows: RowIndex | None
    kv_rows: RowIndex | None
    tag: int


def part_heads(plan: Plan, rank: int) -> Heads:
    """Return the query heads and kv heads that a rank computes."""
    attention = plan.attention
    queries = plan.q_layout_compute.head_range(rank, attention.heads)
    if attention.latent is not None:  # expanded by whoever reads them, for its own heads
        return Heads(queries, queries)
    return Heads(queries, plan.kv_layout_compute.head_range(rank, attention.kv_heads))


def build_rank_parts(plan: Plan, rank: int, device: torch.device) -> list[RankPart]:
    """Build the parts of a rank, with row numbers on a device."""
    parts, tag = [], 0
    for index, part in enumerate(plan.parts_or_self):
        q, kv = part.q_redistribution, part.kv_redistribution
        numbers, rows = _rows(plan, index, rank, False, device)
        kv_numbers, kv_rows = _rows(plan, index, rank, True, device)
        parts.append(
            RankPart(
                part.attention,
                part_heads(part, rank),
                None if q is None else rank_redistribution(q, rank, device, rows=numbers),
                None if kv is None else rank_redistribution(kv, rank, device, rows=kv_numbers),
                None if q is None else rank_redistribution(q, rank, device, adjoint=True),
                None if kv is None else rank_redistribution(kv, rank, device, adjoint=True),
                kv is not None and kv.has_copies,
                rows,
                kv_rows,
                tag,
            )
        )
        messages = [m for program in (part.forward, part.backward) for m in (program.fetch, program.reduce)]
        tag += REDISTRIBUTION_TAGS + 4 * max(map(len, messages))
    return parts


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


#: What a call needs to know about the rank and the group of this process.
Binding = tuple[RankContext, AttentionBackend, GroupTransport | None, CallAgreement | None]


def rank_context(
    plan: Plan, rank: int, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> RankContext:
    """Return the context of a rank. The first call builds it; it is kept as long as the plan lives. Backends with the
    same options share it.

    Raises:
        ConfigError: the backend does not support the attention or the device.
    """
    backend.check(plan.attention, dtype)
    backend.check_device(device)
    key = "context", rank, backend.key, dtype, device
    return kept_with_plan(plan, key, lambda: RankContext(plan, rank, dtype, device))


def bind_rank(
    plan: Plan,
    group: dist.ProcessGroup | None,
    backend: str | AttentionBackend | None,
    timeout: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Binding:
    """Return the context of this process's rank, its backend, its transport and the comparison of its calls with those
    of other ranks; the last two are None for a single rank. Later calls with the same arguments
    return the same objects, as long as the plan lives.

    Raises:
        ConfigError: the timeout is not valid, or the group or the backend does not fit the plan.
    """
    name = backend if isinstance(backend, str) else id(backend)  # the binding keeps the object, and so its id, alive
    key = "binding", group if group is not None else dist.group.WORLD, name, timeout, dtype, device
    try:
        hash(key)
    except TypeError:
        checked_timeout(timeout)
        group_size(group)
        raise
    return kept_with_plan(plan, key, lambda: _bind_rank(plan, group, backend, timeout, dtype, device))


def _bind_rank(
    plan: Plan,
    group: dist.ProcessGroup | None,
    backend: str | AttentionBackend | None,
    timeout: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Binding:
    timeout = checked_timeout(timeout)
    runner = backend_for_device(device.type, backend)
    size = group_size(group, "context_parallel_attention", plan.ranks)
    context = rank_context(plan, group_rank(group), runner, dtype, device)
    if size == 1:
        return context, runner, None, None
    return context, runner, GroupTransport(group, timeout, device), CallAgreement(group, timeout, device)


def prepare(
    plan: Plan,
    rank: int,
    dtype: torch.dtype,
    backend: str | AttentionBackend | None = None,
    device: torch.device | str = "cpu",
    training: bool = True,
) -> None:
    """Build both schedules of a rank, and the digest of the plan, now, for example in a data-loading thread, instead of
    in the first layer's call.

    Args:
        plan: the plan.
        rank: context-parallel rank.
        dtype: type of the tensors.
        backend, training: as for :func:`mindspeed_cp.context_parallel_attention`.
        device: device of the tensors; with its index, unless it is the CPU.

    Raises:
        ConfigError: no such backend supports the device.
    """
    device = torch.device(device)
    runner = backend_for_device(device.type, backend)
    context = rank_context(plan, rank, runner, dtype, device)
    if plan.ranks > 1:
        plan_digest(plan)
    for direction in ("forward", "backward"):
        schedules = context.schedules(plan, runner, direction, training and plan.attention.dropout > 0)
        for part, schedule in zip(context.parts, schedules, strict=True):
            for calls in (calls for step in schedule.steps for _, calls in step.compute):
                runner.prepare(calls, plan.attention, part.heads, device)


# The schedule of one rank: what it posts, computes and waits for in each step.


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
