"""Peak bytes of the communication buffers that the engine allocates for a plan."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import expand
from mindspeed_cp.plan.combine import conclusions, rows_of
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.records import record
from mindspeed_cp.plan.verify.buffers import Buffers, buffers_of

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

    A plan of parts has the buffers of each part from its first turn until it is concluded, and what its moves make from
    before all turns until after them. Counted as moved, too, are rows of a part that do not lie together, which are
    gathered where it has no move that does so, and the caller's tensors, into which the parts' results are put.

    Args:
        plan: the plan.
        direction: "forward" or "backward".
        bytes_per_element: of K and V.

    Returns:
        Records of dtype PEAK [ranks]. Its parts need not be largest at the same time: the total is a bound of what is
        counted.
    """
    made = [
        buffers_of(piece, direction, bytes_per_element, _rows(plan, number, False), _rows(plan, number, True))
        for number, piece in enumerate(plan.pieces)
    ]
    out = np.zeros(plan.ranks, PEAK)
    if plan.parts:
        out["kv"], out["gradients"], out["staging"] = _while_turns(plan, direction, made, bytes_per_element)
        out["moved"] = _moved_by_parts(plan, direction, made, bytes_per_element)
    else:
        (one,) = made
        out["kv"], out["gradients"], out["moved"] = one.kv, one.gradients.sum(1), one.kept + one.there + one.back
        out["staging"] = np.maximum(one.staged.max(0), np.maximum(one.staged_there, one.staged_back))
    out["total"] = out["kv"] + out["gradients"] + out["moved"] + out["staging"]
    return out


def _while_turns(
    plan: Plan, direction: str, made: list[Buffers], size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The most bytes of K/V buffers, of gradients and of staging at any time, int64 [ranks] each: before all turns, in
    each, and after them."""
    turns, ends = plan.turns(direction), conclusions(plan, direction)
    begins = [turns.index((part, 0)) for part in range(len(made))]
    at = [-1] * len(made)  # the step of each part
    kv, gradients, staging = np.zeros((3, len(turns) + 2, plan.ranks), np.int64)
    for now, turn in enumerate((None, *turns, None), -1):
        if turn is not None:
            at[turn[0]] = turn[1]
        for part, one in enumerate(made):
            lives, stays = begins[part] <= now <= ends[part], size == 4 or one.sums_copies
            kv[now] += one.kv * lives
            gradients[now] += one.gradients[:, 1:].sum(1) * lives
            gradients[now] += one.gradients[:, 0] * (begins[part] <= now if stays else lives)
            if now < begins[part]:
                staging[now] += one.staged_there
            elif now <= ends[part]:
                back = one.staged_back if now == ends[part] else 0
                staging[now] += np.maximum(one.staged[at[part]], back)
            else:
                staging[now] += one.staged_back
    return kv.max(0), gradients.max(0), staging.max(0)


def _moved_by_parts(plan: Plan, direction: str, made: list[Buffers], size: int) -> np.ndarray:
    """Bytes of rows that parts gather, of what their moves make, and of the caller's tensors, int64 [ranks]."""
    a = plan.attention
    q_row, kv_row, out_row = a.heads * a.head_dim, a.kv_heads * (a.head_dim + a.head_dim_v), a.heads * a.head_dim_v
    out = np.zeros(plan.ranks, np.int64)
    for rank in range(plan.ranks):
        rows, kv_rows = ([_gathered(plan, part, rank, keys) for part in range(len(made))] for keys in (False, True))
        whole, kv_whole = (
            0 if any(count is None for count in counts) else int(layout.token_counts[rank])
            for counts, layout in ((rows, plan.layout), (kv_rows, plan.layout_kv))
        )
        q_taken = sum(n for part, n in zip(plan.parts, rows, strict=True) if n and part.q_move is None)
        kv_taken = sum(n for part, n in zip(plan.parts, kv_rows, strict=True) if n and part.kv_move is None)
        kept = (q_taken * q_row + kv_taken * kv_row) * size
        there, back = sum(int(one.there[rank]) for one in made), sum(int(one.back[rank]) for one in made)
        if direction == "forward":
            out[rank] = kept + there + back + whole * out_row * size
            continue
        kept += sum(int(one.kept[rank]) for one in made)
        left = back - sum(int(one.back_copies[rank]) for one in made if size < 4)  # rounded when a part returns
        results = (whole * q_row + kv_whole * kv_row) * size
        out[rank] = kept + max(there + q_taken * out_row * size + back, left + results)
    return out


def _rows(plan: Plan, part: int, keys: bool) -> list[np.ndarray] | None:
    """Row numbers of a part on each rank; None in a plan without parts."""
    return [expand(*rows_of(plan, part, rank, keys)) for rank in range(plan.ranks)] if plan.parts else None


def _gathered(plan: Plan, part: int, rank: int, keys: bool) -> int | None:
    """Rows of a part that are copied to be together: 0 where they are one run; None where they are all the rank's."""
    first, count = rows_of(plan, part, rank, keys)
    rows = int(count.sum())
    if rows == (plan.layout_kv if keys else plan.layout).token_counts[rank]:
        return None
    return 0 if (first[1:] == first[:-1] + count[:-1]).all() else rows


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
