"""Redistributions in pieces of documents: a part whose heads are split becomes several parts of some of its documents.

The documents of a part that are on one group of ranks are divided so that every group has its shares of the work in
them. A single document stays whole, and so does what several groups share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.chunked.pieces import edge_parts, with_pieces
from mindspeed_cp.algorithms.head_groups import head_groups_part
from mindspeed_cp.algorithms.linear_layout import with_linear_layout
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.heads import split_tokens_over_group
from mindspeed_cp.plan.pairs import document_pairs
from mindspeed_cp.plan.parts import combine, select_layout
from mindspeed_cp.plan.program import Plan


def cut_documents(plan: Plan, inner: Sequence[float], first: Sequence[float], last: Sequence[float]) -> Plan:
    """Return the plan in which parts with split heads and without messages are cut into pieces of their documents.

    Args:
        plan: plan of self-attention.
        inner, first, last: shares of the work of the pieces of a part: of the first and of the last part that is
            redistributed, and of those between.
    """
    edges = edge_parts(plan)

    if not edges:
        return plan

    def cut(number: int, part: Plan) -> list[Plan]:
        if part.q_layout_compute.heads is None:
            return [replace(part, layout=part.q_layout_compute, kv_layout_in=part.kv_layout_compute)]
        shares = inner if number not in edges else first if number == edges[0] else last
        groups = _groups(part)[0]
        pieces = [groups] if len(part.forward.fetch) else _cut_groups(groups, part, shares)
        return [head_groups_part(piece, piece, part.topology, part.attention) for piece in pieces]

    pieces = [cut(number, part) for number, part in enumerate(plan.parts_or_self)]
    if all(len(of_part) == 1 for of_part in pieces):
        return plan
    out = with_pieces(plan, pieces)
    out = combine(plan.algorithm, out.parts, out.forward_order, out.backward_order)
    return with_linear_layout(out) if any(map(_has_other_rows, plan.parts_or_self)) else out


def _has_other_rows(part: Plan) -> bool:
    """Return True if the caller's rows are those of a layout of linear layers."""
    if part.q_layout_compute.heads is None:
        return part.q_redistribution is not None
    return not split_tokens_over_group(*_groups(part)).same_as(part.layout)


def _groups(part: Plan) -> tuple[Layout, int]:
    """Return the layout over groups of ranks that split heads, as if each were a rank, and the ranks of a group."""
    layout = part.q_layout_compute
    assert layout.heads is not None
    first = np.flatnonzero((layout.heads[:, 0] == 0) & (layout.heads[:, 1] > 0))
    size = int(first[1]) if len(first) > 1 else layout.ranks
    spans = layout.spans[layout.spans["rank"] % size == 0]
    spans["rank"] //= size
    return Layout(layout.documents, layout.ranks // size, spans), size


def _cut_groups(groups: Layout, part: Plan, shares: Sequence[float]) -> list[Layout]:
    """Divide the documents of a part: those with most work first, each to the piece of its group that it leaves least
    filled."""
    work = document_pairs(part.documents, part.documents, part.attention)
    load = np.zeros((groups.ranks, len(shares)))
    piece_of = np.full(len(work), -1)
    rank, doc = (groups.spans[name] for name in ("rank", "doc"))
    for i in np.argsort(-work[doc], kind="stable").tolist():
        if piece_of[doc[i]] < 0:
            filled = (load[rank[i]] + work[doc[i]]) / np.asarray(shares)
            piece_of[doc[i]] = int(filled.argmin())
            load[rank[i], piece_of[doc[i]]] += work[doc[i]]
    chosen = [piece_of == piece for piece in range(len(shares))]
    return [select_layout(groups, mask) for mask in chosen if mask.any()]
