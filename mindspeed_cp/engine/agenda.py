"""One rank's agenda: what it posts, computes and finishes in each step.  Made once for a plan and cached beside it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.engine.pieces import pieces_of
from mindspeed_cp.ops.attention import AttentionBackend, Heads, Lowered, backend_for
from mindspeed_cp.plan import Messages, Plan, Program

Rows = slice | Tensor


@dataclass(frozen=True)
class Post:
    """One message as one of its two ends sees it.

    Attributes:
        number: tells this message from all others of the program.
        reduces: a gradient travels, not keys and values.
        sends: this rank sends.
        peer: the other rank.
        slot: of this rank.
        rows: of that slot; a slice when they are one run.
        count: how many rows.
        what: for error messages.
    """

    number: int
    reduces: bool
    sends: bool
    peer: int
    slot: int
    rows: Rows
    count: int
    what: str


@dataclass(frozen=True)
class Step:
    """What one rank does in one step.

    Attributes:
        posts: messages to post, in the plan's order.
        compute: (slot, calls) pairs.
        finish: numbers of the messages to finish: reduces first.
    """

    posts: Sequence[Post]
    compute: Sequence[tuple[int, Sequence[Any]]]
    finish: Sequence[int]


@dataclass(frozen=True)
class Agenda:
    """What one rank does in one direction.

    Attributes:
        steps: one entry for each step.
        capacity: rows of each slot.
        stores_all_rows: the first result of every query is stored, so accumulators need not start at zero.
    """

    steps: Sequence[Step]
    capacity: Sequence[int]
    stores_all_rows: bool


_known: WeakKeyDictionary[Plan, dict[tuple[Any, ...], Agenda]] = WeakKeyDictionary()
_lock = threading.Lock()


def agenda_of(
    plan: Plan,
    rank: int,
    direction: str,
    backend: AttentionBackend,
    dtype: torch.dtype,
    drops: bool,
    device: torch.device,
) -> Agenda:
    """The agenda, made at the first call and kept as long as the plan lives.

    Args:
        plan: a plan without parts.
        rank: context-parallel rank.
        direction: "forward" or "backward".
        backend: lowers the tiles.
        dtype: of q, k and v; the best calls depend on it.
        drops: attention weights are dropped; without, the calls are those of an attention without dropout.
        device: of the tensors; row numbers lie there.
    """
    with _lock:
        mine = _known.setdefault(plan, {})
    key = rank, direction, backend.key, dtype, drops, device
    if key not in mine:
        program: Program = getattr(plan, direction)
        lower = backend.lower_forward if direction == "forward" else backend.lower_backward
        tiles, rows = program.tiles(rank), int(plan.q_layout.token_counts[rank])
        lowered = lower(tiles, rows, plan.attention if drops else replace(plan.attention, dropout=0.0), dtype)
        mine[key] = _make(program, rank, lowered, stores_all_rows(tiles, rows), device)
    return mine[key]


def prepare(
    plan: Plan,
    rank: int,
    dtype: torch.dtype,
    backend: str | AttentionBackend | None = None,
    device: torch.device | str = "cpu",
    training: bool = True,
) -> None:
    """Make both agendas of a rank now, for instance in the thread that loads data, and not in the first layer's call.

    Args:
        plan: the plan.
        rank: context-parallel rank.
        dtype: of the tensors that will come.
        backend, training: as for :func:`mindspeed_cp.context_parallel_attention`.
        device: of the tensors that will come; with its number, if it is not the CPU.

    Raises:
        ConfigError: no such backend serves that device.
    """
    device = torch.device(device)
    runner = backend_for(device.type, backend)
    runner.check_device(device)
    for piece in plan.pieces:
        heads = heads_of(piece, rank)
        for direction in ("forward", "backward"):
            agenda = agenda_of(piece, rank, direction, runner, dtype, training and plan.attention.dropout > 0, device)
            for step in agenda.steps:
                for _, calls in step.compute:
                    runner.place(calls, plan.attention, heads, device)
    pieces_of(plan, rank, device)


def heads_of(plan: Plan, rank: int) -> Heads:
    """The heads that a rank computes."""
    attention = plan.attention
    return Heads(plan.q_layout.head_range(rank, attention.heads), plan.kv_layout.head_range(rank, attention.kv_heads))


def _make(program: Program, rank: int, lowered: Lowered, stores_all_rows: bool, device: torch.device) -> Agenda:
    """Messages and calls of one rank, step by step."""
    posts: list[list[Post]] = [[] for _ in range(program.steps)]
    finish: list[list[int]] = [[] for _ in range(program.steps)]
    for kind, messages in (("reduce", program.reduce), ("fetch", program.fetch)):
        one_run = {side: messages.is_one_run(side) for side in ("src", "dst")}
        for index in messages.involving(rank).tolist():
            post = _post(messages, index, kind, rank, one_run, device)
            posts[int(messages.items["start"][index])].append(post)
            finish[int(messages.items["done"][index])].append(post.number)
    slots = range(program.capacity.shape[1])
    steps = [
        Step(posts[s], [(slot, lowered[s, slot]) for slot in slots if (s, slot) in lowered], finish[s])
        for s in range(program.steps)
    ]
    return Agenda(steps, program.capacity[rank].tolist(), stores_all_rows)


def stores_all_rows(tiles: np.ndarray, rows: int) -> bool:
    """True when every q row is in some tile, and every tile finds its rows all untouched or all touched: then the first
    result of every row is stored, and what its memory held before does not matter."""
    touched = np.zeros(rows, bool)
    left = rows
    for first, count in zip(tiles["q_row"].tolist(), tiles["q_rows"].tolist(), strict=True):
        if not left:
            break
        seen = int(np.count_nonzero(touched[first : first + count]))
        if seen not in (0, count):
            return False
        touched[first : first + count] = True
        left -= count - seen
    return not left


def _post(
    messages: Messages, index: int, kind: str, rank: int, one_run: Mapping[str, np.ndarray], device: torch.device
) -> Post:
    item = messages.items[index]
    sends = bool(item["src"] == rank)
    here, there = ("src", "dst") if sends else ("dst", "src")
    if one_run[here][index]:
        first = int(messages.runs_of(index)[here + "_row"][0])
        rows: Rows = slice(first, first + int(item["rows"]))
    else:
        rows = torch.from_numpy(messages.rows_of(index)[0 if sends else 1]).to(device)
    number = 2 * index + (kind == "reduce")
    what = f"{'dK and dV' if kind == 'reduce' else 'K and V'}, step {item['start']}, {item['rows']} rows"
    return Post(
        number, kind == "reduce", sends, int(item[there]), int(item[here + "_slot"]), rows, int(item["rows"]), what
    )
