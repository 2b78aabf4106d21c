"""Peak bytes of the communication buffers that the engine allocates for a plan."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import Redistribution
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages, record

#: Bytes of one rank: K/V receive buffers, fp32 gradients, what moves between layouts make, staging of what is under way
#: (its largest moment), total.
PEAK = record("kv gradients moved staging total")


def peak_bytes(plan: Plan, direction: str, bytes_per_element: int = 2) -> np.ndarray:
    """Bytes of communication buffers of every rank, and of nothing else.

    Counted is what the engine allocates so that rows can travel:

    * kv: slots 1 and up, K and V, for the whole program;
    * gradients (backward): dK and dV in fp32 of every slot that is computed or receives a reduce, for the whole
      program;
    * moved: results of moves between the caller's layouts and those of the computation: q, k, v and out in the forward,
      dout, dq, dk and dv in the backward, where those of q, k and v, kept from the forward, count as well;
    * staging: rows that leave from several places are gathered, K and V that land in several places and every reduce
      are received apart; in moves, heads too are cut out and put in. The largest sum over what is under way at once.

    Not counted is what one rank alone would need as well. With t rows of queries and r of keys that this rank computes
    with, h and g heads of them, widths d and e (of v and the output), b bytes an element; the terms in b are there
    where b < 4, as fp32 is not rounded:

    * forward: out and its lse, in fp32 and rounded: t*h*(4*e + 4) + b*t*h*e;
    * backward: out and lse from the forward (t*h*(b*e + 4)), dq in fp32 and rounded (4*t*h*d + b*t*h*d), dk and dv
      rounded (b*r*g*(d + e)). Where a kv head is on several ranks, dk and dv are rounded last, rows and heads of the
      caller's layout, when the rounded dq has gone: the larger of the two terms counts;
    * copies of q, k, v and of the output's gradient, where the caller's are not contiguous: as large as these;
    * the caller's tensors, and what the kernels of the attention operator make of one call.

    Args:
        plan: the plan.
        direction: "forward" or "backward".
        bytes_per_element: of K and V.

    Returns:
        Records of dtype PEAK [ranks]. Its parts need not be largest at the same time: the total is a bound of what is
        counted.
    """
    program: Program = getattr(plan, direction)
    kv_heads = plan.attention.kv_heads
    held = np.array([np.subtract(*plan.kv_layout.head_range(r, kv_heads)[::-1]) for r in range(plan.ranks)])
    width = held * (plan.attention.head_dim + plan.attention.head_dim_v)
    out = np.zeros(plan.ranks, PEAK)
    out["kv"] = program.capacity[:, 1:].sum(1) * width * bytes_per_element
    if direction == "backward":
        summed = np.zeros_like(program.capacity, bool)
        summed[:, 0] = True
        summed[program.contents["rank"], program.contents["slot"]] = True
        summed[program.reduce.items["dst"], program.reduce.items["dst_slot"]] = True
        out["gradients"] = (program.capacity * summed).sum(1) * width * 4
    staged = np.zeros((program.steps, plan.ranks), np.int64)
    _add_staging(staged, program.fetch, bytes_per_element, receive_apart=~program.fetch.is_one_run("dst"))
    _add_staging(staged, program.reduce, 4, receive_apart=np.ones(len(program.reduce), bool))
    moved, moving = _moves(plan, direction, bytes_per_element)
    out["moved"] = moved
    out["staging"] = np.maximum(staged.max(0) * width, moving)
    out["total"] = out["kv"] + out["gradients"] + out["moved"] + out["staging"]
    return out


def _moves(plan: Plan, direction: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the results of a direction's moves, and of the staging of the larger of its two, int64 [ranks] each."""
    qk, v = plan.attention.head_dim, plan.attention.head_dim_v
    q_move, kv_move = plan.q_move, plan.kv_move
    summed = 4 if kv_move is not None and kv_move.replicates else size
    if direction == "forward":
        there, back = [(q_move, qk * size), (kv_move, (qk + v) * size)], [(q_move, v * size)]
    else:
        there, back = [(q_move, v * size)], [(q_move, qk * size), (kv_move, (qk + v) * summed)]
    results, staging = np.zeros(plan.ranks, np.int64), np.zeros((2, plan.ranks), np.int64)
    kept = [(q_move, qk * size), (kv_move, (qk + v) * size)] if direction == "backward" else []
    for move, width in kept:
        if move is not None:
            results += _result(move, adjoint=False) * width
    for phase, moves in enumerate((there, back)):
        for move, width in moves:
            if move is not None:
                results += _result(move, adjoint=phase == 1) * width
                staging[phase] += _staging(move, adjoint=phase == 1) * width
    return results, staging.max(0)


def _result(move: Redistribution, adjoint: bool) -> np.ndarray:
    """(row, head) pairs of a move's result, int64 [ranks]."""
    if adjoint:
        return move.source.token_counts * move.heads
    ranges = [move.target.head_range(rank, move.heads) for rank in range(move.target.ranks)]
    return move.target.token_counts * np.array([last - first for first, last in ranges])


def _staging(move: Redistribution, adjoint: bool) -> np.ndarray:
    """(row, head) pairs that a move holds apart while it is under way, int64 [ranks], at most: parts of some heads, or
    of rows in several places, on the side with all heads; rows in several places on the other; what is summed; and what
    a rank keeps, where it gathers that from several places."""
    out = np.zeros(move.source.ranks, np.int64)
    for part in move.parts:
        runs, pairs = move.runs_of(part), int(part["rows"] * part["heads"])
        if part["src"] == part["dst"]:
            if not _one_run(runs["dst_row" if adjoint else "src_row"], runs["rows"]):
                out[part["src"]] += pairs
            continue
        some_heads = part["heads"] < move.heads and part["rows"] > 1
        if some_heads or not _one_run(runs["src_row"], runs["rows"]) or (adjoint and move.replicates):
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


def check_memory(plan: Plan, max_bytes: int, bytes_per_element: int) -> None:
    """Raise PlanError naming the rank and direction whose buffers pass `max_bytes`."""
    for direction in ("forward", "backward"):
        peak = peak_bytes(plan, direction, bytes_per_element)
        rank = int(np.argmax(peak["total"]))
        if peak["total"][rank] > max_bytes:
            p = peak[rank]
            raise PlanError(
                f"{direction}: rank {rank}: communication buffers take {p['total']} bytes ({p['kv']} keys and values, "
                f"{p['gradients']} gradients, {p['moved']} moved, {p['staging']} staging), more than the bound of "
                f"{max_bytes}"
            )
