"""All messages of one direction of a plan, as one table: fetches, reduces, and moves between layouts."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cost.compute import LayerCost
from mindspeed_cp.layout import Layout, Redistribution
from mindspeed_cp.plan.combine import conclusions
from mindspeed_cp.plan.program import Plan, Program

GRADIENT = 4  # bytes of gradients that are summed

#: What a transfer carries, by its `kind`: keys and values between steps, their gradients on the way back; q, k, v, out
#: or their gradients between two layouts of attention; hidden states between those of linear layers and attention.
KINDS = ("keys", "gradients", "move", "remap")
KEYS, GRADIENTS, MOVE, REMAP = range(len(KINDS))

#: `bytes` from src to dst for part `part`, posted by both when turn `start` begins, finished in turn `done`. Turns are
#: those of the plan with :func:`edges` others before and after them.
TRANSFER = np.dtype(
    [*((name, np.int64) for name in ("src", "dst", "start", "done", "kind", "part")), ("bytes", np.float64)]
)


def transfers(plan: Plan, direction: str, layer: LayerCost) -> np.ndarray:
    """Records of dtype TRANSFER, sorted by `start`; within a turn in the order in which the plan posts them.

    Args:
        plan: any plan.
        direction: "forward" or "backward".
        layer: how wide rows are that a remap moves, and how many bytes an element has.
    """
    element = layer.bytes_per_element
    found = [np.empty(0, TRANSFER), *_steps(plan, direction, element), *_moves(plan, direction, element)]
    if plan.linear is not None:
        found += _remap(plan, direction, layer)
    out = np.concatenate(found)
    return out[np.lexsort((out["src"] ^ out["dst"], out["part"], out["start"]))]


def heads_of(layout: Layout, heads: int) -> np.ndarray:
    """Heads of every rank, int64 [ranks]."""
    return np.full(layout.ranks, heads) if layout.heads is None else np.diff(layout.heads, axis=1)[:, 0]


def edges(plan: Plan) -> int:
    """Turns before the first one of the plan, and as many after its last.

    One waits for moves between layouts of attention. Where hidden states move there are two more around it: one that
    waits for them, and, nearer to attention, one that computes the projections (:mod:`.linear`).
    """
    return 1 if plan.linear is None else 3


def turn_count(plan: Plan, direction: str) -> int:
    """Turns of a direction, with those before and after the plan's."""
    return len(plan.turns(direction)) + 2 * edges(plan)


def places(plan: Plan, direction: str) -> list[np.ndarray]:
    """For each piece the turn of each of its steps; the first one of the plan is turn `edges(plan)`."""
    out = [np.zeros(getattr(piece, direction).steps, np.int64) for piece in plan.pieces]
    for number, (piece, step) in enumerate(plan.turns(direction), edges(plan)):
        out[piece][step] = number
    return out


def _steps(plan: Plan, direction: str, element: int) -> list[np.ndarray]:
    attention = plan.attention
    found = []
    for number, (piece, place) in enumerate(zip(plan.pieces, places(plan, direction), strict=True)):
        program: Program = getattr(piece, direction)
        row = heads_of(piece.kv_layout, attention.kv_heads) * (attention.head_dim + attention.head_dim_v)
        for messages, kind, size in ((program.fetch, KEYS, element), (program.reduce, GRADIENTS, GRADIENT)):
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


def _moves(plan: Plan, direction: str, element: int) -> list[np.ndarray]:
    """Moves between layouts of attention."""
    attention, forward = plan.attention, direction == "forward"
    first, last = edges(plan) - 1, turn_count(plan, direction) - edges(plan)
    leaves = conclusions(plan, direction)
    width, width_v = attention.head_dim, attention.head_dim_v
    found = []
    for number, (piece, place) in enumerate(zip(plan.pieces, places(plan, direction), strict=True)):
        before, after = int(place.min(initial=last)) - 1, min(leaves[number] + 2 + first, last)
        if piece.q_move is not None:
            there, back = (width, width_v) if forward else (width_v, width)
            found.append(_of(piece.q_move, False, there * element, first, before, MOVE, number))
            found.append(_of(piece.q_move, True, back * element, after, last, MOVE, number))
        if piece.kv_move is not None:
            size = GRADIENT if piece.kv_move.replicates and not forward else element
            start, due = (first, before) if forward else (after, last)
            found.append(_of(piece.kv_move, not forward, (width + width_v) * size, start, due, MOVE, number))
    return found


def _remap(plan: Plan, direction: str, layer: LayerCost) -> list[np.ndarray]:
    """Hidden states to attention's layout in the first turn, and back in the last one. Every tensor-parallel rank moves
    its share of the rows, or all of them; over the links of this rank go its own."""
    assert plan.linear is not None
    hidden = Redistribution.between(plan.linear, plan.layout, 1)
    if hidden is None:
        return []
    row = layer.hidden_size * layer.bytes_per_element / layer.row_shares
    last = turn_count(plan, direction) - 1
    return [_of(hidden, adjoint, row, at, at, REMAP, 0) for adjoint, at in ((False, 0), (True, last))]


def _of(move: Redistribution, adjoint: bool, row: float, start: int, done: int, kind: int, part: int) -> np.ndarray:
    """The messages of a redistribution; a row of one head has `row` bytes."""
    parts = move.parts[move.parts["src"] != move.parts["dst"]]
    out = np.empty(len(parts), TRANSFER)
    out["src"], out["dst"] = (parts["dst"], parts["src"]) if adjoint else (parts["src"], parts["dst"])
    out["start"], out["done"], out["kind"], out["part"] = start, done, kind, part
    out["bytes"] = parts["rows"] * parts["heads"] * float(row)
    return out
