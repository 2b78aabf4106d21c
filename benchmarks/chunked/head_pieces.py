"""Heads in pieces: a part becomes several, each with some of every rank's heads of the same documents.

The redistribution, messages and tiles of a piece are those of the part for fewer heads, so tiles are as large as
before. A real plan cannot have such parts, which are of the same documents; here they are simulated, and every piece is
proved by itself, as a plan of attention with that many heads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.chunked.pieces import each_part, edge_parts
from mindspeed_cp.plan.problem import AttentionConfig
from mindspeed_cp.plan.program import Plan


def cut_heads(plan: Plan, pieces: int, only_edges: bool = False) -> Plan:
    """Return the plan in which parts with messages are cut into pieces of their heads.

    A part stays whole if a rank has too few heads, or if pieces of a key/value head's query heads would be unequal.

    Args:
        plan: any plan.
        pieces: pieces of a part.
        only_edges: cut only the first and the last part that is redistributed.
    """
    edges = edge_parts(plan)

    def cut(number: int, part: Plan) -> list[Plan]:
        travels = part.q_redistribution is not None or len(part.forward.fetch)
        if not travels or (only_edges and number not in edges) or part_of_heads(part, pieces) is None:
            return [part]
        return [_piece(part, pieces, piece) for piece in range(pieces)]

    return each_part(plan, cut)


def part_of_heads(part: Plan, pieces: int) -> Plan | None:
    """Return a piece of a part as a plan of attention with only its heads, which verify_plan proves; all pieces are
    alike but for the numbers of their heads. None if the part cannot be cut."""
    attention = part.attention
    shared = attention.heads // attention.kv_row.heads
    width = part.q_layout_compute.head_counts(attention.heads)
    if (width % pieces).any() or attention.latent is not None:
        return None
    if (width % (shared * pieces) == 0).all():
        kv_heads = attention.kv_heads // pieces
    elif shared % pieces == 0 and (width > 0).all() and (shared % width == 0).all():
        kv_heads = attention.kv_heads
    else:
        return None
    fewer = replace(attention, heads=attention.heads // pieces, kv_heads=kv_heads)
    layout = part.q_layout_compute
    queries = layout if layout.heads is None else layout.with_heads(layout.heads // pieces)
    keys = part.kv_layout_compute
    if layout.heads is not None:
        assert queries.heads is not None
        keys = keys.with_heads(_kv_range(queries.heads, fewer))
    programs = (
        replace(program, attention=fewer, q_layout_compute=queries) for program in (part.forward, part.backward)
    )
    forward, backward = programs
    return replace(
        part, attention=fewer, q_layout_compute=queries, kv_layout_compute=keys, forward=forward, backward=backward
    )


def _piece(part: Plan, pieces: int, piece: int) -> Plan:
    """Return a piece of a part, with the numbers that its heads have in the part."""
    attention = part.attention
    bounds = part.q_layout_compute.head_bounds(attention.heads)
    width = (bounds[:, 1] - bounds[:, 0]) // pieces
    first = bounds[:, 0] + piece * width
    heads = np.stack([first, first + width], 1)
    queries = part.q_layout_compute.with_heads(heads)
    return replace(
        part,
        q_layout_compute=queries,
        kv_layout_compute=part.kv_layout_compute.with_heads(_kv_range(heads, attention)),
        forward=replace(part.forward, q_layout_compute=queries),
        backward=replace(part.backward, q_layout_compute=queries),
    )


def _kv_range(heads: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Return the key/value heads that ranges of query heads read, int64 [ranks, 2]."""
    shared = attention.heads // attention.kv_row.heads
    first, last = heads[:, 0] // shared, -(-heads[:, 1] // shared)
    return np.stack([first, np.where(heads[:, 1] > heads[:, 0], last, first)], 1)
