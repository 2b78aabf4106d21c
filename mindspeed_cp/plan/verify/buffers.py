"""What the engine allocates for the communication of one plan without parts, buffer by buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.layout import Redistribution, expand
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages


@dataclass(frozen=True)
class Buffers:
    """Bytes in one direction, int64; see `peak_bytes` for what they are.

    Attributes:
        kv: of receive buffers, [ranks].
        gradients: of each slot's gradients, [ranks, slots].
        staged: of staging in each step, [steps, ranks].
        kept: results of the forward's moves that the backward still has, [ranks].
        there, back: results of the moves before and after the steps, [ranks].
        back_copies: the part of `back` that sums copies of kv heads, and is rounded afterwards, [ranks].
        staged_there, staged_back: staging of these moves, [ranks].
        sums_copies: a kv head is on several ranks, so gradients stay fp32 until they are back.
    """

    kv: np.ndarray
    gradients: np.ndarray
    staged: np.ndarray
    kept: np.ndarray
    there: np.ndarray
    back: np.ndarray
    back_copies: np.ndarray
    staged_there: np.ndarray
    staged_back: np.ndarray
    sums_copies: bool


#: For each rank the row numbers of a part among the caller's rows; None: they are all.
Rows = Sequence[np.ndarray] | None


def buffers_of(plan: Plan, direction: str, size: int, rows: Rows = None, kv_rows: Rows = None) -> Buffers:
    """Buffers of a plan without parts, `size` bytes an element; of a part, whose rows are some of the caller's, too."""
    program: Program = getattr(plan, direction)
    kv_heads = plan.attention.kv_heads
    held = np.array([np.subtract(*plan.kv_layout.head_range(r, kv_heads)[::-1]) for r in range(plan.ranks)])
    width = held * (plan.attention.head_dim + plan.attention.head_dim_v)
    gradients = np.zeros_like(program.capacity)
    if direction == "backward":
        summed = np.zeros_like(program.capacity, bool)
        summed[:, 0] = True
        summed[program.contents["rank"], program.contents["slot"]] = True
        summed[program.reduce.items["dst"], program.reduce.items["dst_slot"]] = True
        gradients = program.capacity * summed * width[:, None] * 4
    staged = np.zeros((program.steps, plan.ranks), np.int64)
    _add_staging(staged, program.fetch, size, receive_apart=~program.fetch.is_one_run("dst"))
    _add_staging(staged, program.reduce, 4, receive_apart=np.ones(len(program.reduce), bool))
    kv = program.capacity[:, 1:].sum(1) * width * size
    return Buffers(kv, gradients, staged * width, *_moves(plan, direction, size, (rows, kv_rows)))


def _moves(
    plan: Plan, direction: str, size: int, rows: tuple[Rows, Rows]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, bool]:
    """The fields of `Buffers` that moves have."""
    qk, v = plan.attention.head_dim, plan.attention.head_dim_v
    q_move, kv_move = plan.q_move, plan.kv_move
    copies = kv_move is not None and kv_move.replicates
    forward = [(q_move, qk * size), (kv_move, (qk + v) * size)]
    if direction == "forward":
        kept, there, back = [], forward, [(q_move, v * size)]
    else:
        summed = 4 if copies else size
        kept, there, back = forward, [(q_move, v * size)], [(q_move, qk * size), (kv_move, (qk + v) * summed)]

    def bytes_of(count: str, moves: list[tuple[Redistribution | None, int]], adjoint: bool) -> np.ndarray:
        found = np.zeros(plan.ranks, np.int64)
        for move, width in moves:
            if move is not None:
                if count == "result":
                    found += _result(move, adjoint) * width
                else:
                    found += held_apart(move, adjoint, rows[int(move is not q_move)]) * width
        return found

    return (
        bytes_of("result", kept, False),
        bytes_of("result", there, False),
        bytes_of("result", back, True),
        bytes_of("result", back[1:] if copies else [], True),
        bytes_of("staging", there, False),
        bytes_of("staging", back, True),
        copies,
    )


def _result(move: Redistribution, adjoint: bool) -> np.ndarray:
    """(row, head) pairs of a move's result, int64 [ranks]."""
    if adjoint:
        return move.source.token_counts * move.heads
    ranges = [move.target.head_range(rank, move.heads) for rank in range(move.target.ranks)]
    return move.target.token_counts * np.array([last - first for first, last in ranges])


def held_apart(move: Redistribution, adjoint: bool, rows: Rows = None) -> np.ndarray:
    """(row, head) pairs that a move holds apart while it is under way, int64 [ranks], at most: parts of some heads, or
    of rows in several places, on the side with all heads; rows in several places on the other; what is summed; and what
    a rank keeps, where it gathers that from several places. `rows`: where the source's rows are among the caller's."""
    out = np.zeros(move.source.ranks, np.int64)
    for part in move.parts:
        runs, pairs = move.runs_of(part), int(part["rows"] * part["heads"])
        at, count = runs["src_row"], runs["rows"]
        if rows is not None and not adjoint:  # the way back is to the part's own rows
            at = rows[part["src"]][expand(at, count)]
            count = np.ones_like(at)
        if part["src"] == part["dst"]:
            if not (_one_run(runs["dst_row"], runs["rows"]) if adjoint else _one_run(at, count)):
                out[part["src"]] += pairs
            continue
        some_heads = part["heads"] < move.heads and part["rows"] > 1
        if some_heads or not _one_run(at, count) or (adjoint and move.replicates):
            out[part["src"]] += pairs
        if not _one_run(runs["dst_row"], runs["rows"]):
            out[part["dst"]] += pairs
    return out


def _one_run(first: np.ndarray, rows: np.ndarray) -> bool:
    return bool((first[1:] == first[:-1] + rows[:-1]).all())


def _add_staging(staged: np.ndarray, messages: Messages, size: int, receive_apart: np.ndarray) -> None:
    for item, gathered, apart in zip(messages.items, ~messages.is_one_run("src"), receive_apart, strict=True):
        steps = slice(item["start"], item["done"] + 1)
        if gathered:
            staged[steps, item["src"]] += item["rows"] * size
        if apart:
            staged[steps, item["dst"]] += item["rows"] * size
