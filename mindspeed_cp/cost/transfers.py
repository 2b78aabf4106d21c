"""All messages of one direction of a plan, as one table: fetches, reduces, and moves between layouts."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cost.compute import LayerCost
from mindspeed_cp.layout import Layout, Redistribution
from mindspeed_cp.plan.combine import conclusions
from mindspeed_cp.plan.program import Plan, Program

ELEMENT, GRADIENT = 2, 4  # bytes of q, k, v and out; of gradients that are summed

#: What a transfer carries, by its `kind`: keys and values between steps, their gradients on the way back; q, k, v, out
#: or their gradients between two layouts of attention; hidden states between those of linear layers and attention.
KINDS = ("keys", "gradients", "move", "remap")
KEYS, GRADIENTS, MOVE, REMAP = range(len(KINDS))

#: `bytes` from src to dst for part `part`, posted by both when turn `start` begins, finished in turn `done`. Turn 0
#: waits for the moves before the first turn of the plan, which is turn 1; the last turn for those after its last.
TRANSFER = np.dtype(
    [*((name, np.int64) for name in ("src", "dst", "start", "done", "kind", "part")), ("bytes", np.float64)]
)


def transfers(plan: Plan, direction: str, layer: LayerCost) -> np.ndarray:
    """Records of dtype TRANSFER, sorted by `start`; within a turn in the order in which the plan posts them.

    Args:
        plan: any plan.
        direction: "forward" or "backward".
        layer: its hidden size is that of what a remap moves.
    """
    found = [np.empty(0, TRANSFER), *_steps(plan, direction), *_moves(plan, direction, layer)]
    out = np.concatenate(found)
    return out[np.lexsort((out["src"] ^ out["dst"], out["part"], out["start"]))]


def heads_of(layout: Layout, heads: int) -> np.ndarray:
    """Heads of every rank, int64 [ranks]."""
    return np.full(layout.ranks, heads) if layout.heads is None else np.diff(layout.heads, axis=1)[:, 0]


def places(plan: Plan, direction: str) -> list[np.ndarray]:
    """For each piece the turn (from 1) of each of its steps."""
    out = [np.zeros(getattr(piece, direction).steps, np.int64) for piece in plan.pieces]
    for number, (piece, step) in enumerate(plan.turns(direction), 1):
        out[piece][step] = number
    return out


def _steps(plan: Plan, direction: str) -> list[np.ndarray]:
    attention = plan.attention
    found = []
    for number, (piece, place) in enumerate(zip(plan.pieces, places(plan, direction), strict=True)):
        program: Program = getattr(piece, direction)
        row = heads_of(piece.kv_layout, attention.kv_heads) * (attention.head_dim + attention.head_dim_v)
        for messages, kind, size in ((program.fetch, KEYS, ELEMENT), (program.reduce, GRADIENTS, GRADIENT)):
            items = messages.items
            out = np.empty(len(items), TRANSFER)
            for name in ("src", "dst"):
                out[name] = items[name]
            for name in ("start", "done"):
                out[name] = place[items[name]]
            out["kind"], out["part"] = kind, number
            out["bytes"] = items["rows"] * row[items["src"]] * float(size)
            found.append(out)
    return found


def _moves(plan: Plan, direction: str, layer: LayerCost) -> list[np.ndarray]:
    """Moves between layouts, of hidden states too."""
    attention, turns = plan.attention, plan.turns(direction)
    last, forward = len(turns) + 1, direction == "forward"
    leaves = conclusions(plan, direction)
    width, width_v = attention.head_dim, attention.head_dim_v
    found = []
    for number, (piece, place) in enumerate(zip(plan.pieces, places(plan, direction), strict=True)):
        before, after = int(place.min(initial=last)) - 1, min(leaves[number] + 2, last)
        if piece.q_move is not None:
            there, back = (width, width_v) if forward else (width_v, width)
            found.append(_of(piece.q_move, False, there * ELEMENT, 0, before, MOVE, number))
            found.append(_of(piece.q_move, True, back * ELEMENT, after, last, MOVE, number))
        if piece.kv_move is not None:
            size = GRADIENT if piece.kv_move.replicates and not forward else ELEMENT
            first, due = (0, before) if forward else (after, last)
            found.append(_of(piece.kv_move, not forward, (width + width_v) * size, first, due, MOVE, number))
    if plan.linear is not None:
        hidden = Redistribution.between(plan.linear, plan.layout, 1)
        if hidden is not None:
            for adjoint, at in ((False, 0), (True, last)):
                found.append(_of(hidden, adjoint, layer.hidden_size * ELEMENT, at, at, REMAP, 0))
    return found


def _of(move: Redistribution, adjoint: bool, row: float, start: int, done: int, kind: int, part: int) -> np.ndarray:
    """The messages of a redistribution; a row of one head has `row` bytes."""
    parts = move.parts[move.parts["src"] != move.parts["dst"]]
    out = np.empty(len(parts), TRANSFER)
    out["src"], out["dst"] = (parts["dst"], parts["src"]) if adjoint else (parts["src"], parts["dst"])
    out["start"], out["done"], out["kind"], out["part"] = start, done, kind, part
    out["bytes"] = parts["rows"] * parts["heads"] * float(row)
    return out
