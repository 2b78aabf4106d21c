"""A bound of tokens for each rank, kept to the token.

Placements have shares, and shares are rounded to tokens, so that a rank may end with a few too many. They are handed
on: the last rows of a document that another rank with room shares, or else of the rank's shortest document.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Layout, from_spans


def within(layout: Layout, room: np.ndarray, per_node: int) -> Layout:
    """The layout, with rows moved so that no rank has more than it has room for.

    Args:
        layout: any.
        room: tokens that each rank may hold, int64 [ranks].
        per_node: ranks of a node; rows stay on it where they can.

    Returns:
        The layout; where ranks have no room for what they hold and nobody else has, as near to that as can be.
    """
    over = layout.token_counts - np.maximum(room, 0)
    if (over <= 0).all():
        return layout
    spans = [list(map(list, layout.of(rank).tolist())) for rank in range(layout.ranks)]
    for rank in np.flatnonzero(over > 0).tolist():
        while over[rank] > 0 and (over < 0).any():
            place, taker = _next(spans, over, rank, per_node)
            span = spans[rank][place]
            count = min(int(over[rank]), int(-over[taker]), span[3] - span[2])
            span[3] -= count
            spans[taker].append([taker, span[1], span[3], span[3] + count])
            over[rank] -= count
            over[taker] += count
            if span[2] == span[3]:
                del spans[rank][place]
    found = np.array([tuple(span) for mine in spans for span in mine], layout.spans.dtype)
    return from_spans(layout.documents, layout.ranks, found)


def _next(spans: list[list[list[int]]], over: np.ndarray, rank: int, per_node: int) -> tuple[int, int]:
    """Which span of the rank loses rows, and to whom: one that a rank with room shares, of the same node rather than of
    another; else the shortest, to the rank with the most room."""
    takers = sorted(np.flatnonzero(over < 0).tolist(), key=lambda other: (other // per_node != rank // per_node, other))
    last = {span[1]: place for place, span in enumerate(spans[rank])}
    for taker in takers:
        shared = [last[span[1]] for span in spans[taker] if span[1] in last]
        if shared:
            return max(shared, key=lambda place: spans[rank][place][3] - spans[rank][place][2]), taker
    near = [taker for taker in takers if taker // per_node == rank // per_node] or takers
    place = min(range(len(spans[rank])), key=lambda i: spans[rank][i][3] - spans[rank][i][2])
    return place, min(near, key=lambda taker: over[taker])
