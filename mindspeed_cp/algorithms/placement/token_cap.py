"""The limit of tokens on each rank, kept exactly.

Shares of a placement are rounded to tokens, so a rank may end with a few tokens too many. They are handed on: the last
rows of a document that another rank with room shares, or otherwise of the rank's shortest document.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Layout, from_spans


def apply_token_cap(layout: Layout, caps: np.ndarray, ranks_per_node: int) -> Layout:
    """Move rows so that no rank has more tokens than its cap.

    Args:
        layout: any layout with all heads on every rank.
        caps: tokens that each rank may hold, int64 [ranks].
        ranks_per_node: ranks of a node; rows stay on their node if possible.

    Returns:
        The new layout; if all caps together are too small, the excess that no rank has room for stays where it is.
    """
    excess = layout.token_counts - np.maximum(caps, 0)
    if (excess <= 0).all():
        return layout
    spans = [list(map(list, layout.rank_spans(rank).tolist())) for rank in range(layout.ranks)]
    for rank in np.flatnonzero(excess > 0).tolist():
        while excess[rank] > 0 and (excess < 0).any():
            index, taker = _next_handover(spans, excess, rank, ranks_per_node)
            span = spans[rank][index]  # rank, doc, start, stop
            count = min(int(excess[rank]), int(-excess[taker]), span[3] - span[2])
            span[3] -= count
            spans[taker].append([taker, span[1], span[3], span[3] + count])
            excess[rank] -= count
            excess[taker] += count
            if span[2] == span[3]:
                del spans[rank][index]
    records = np.array([tuple(span) for rank_spans in spans for span in rank_spans], layout.spans.dtype)
    return from_spans(layout.documents, layout.ranks, records)


def _next_handover(spans: list[list[list[int]]], excess: np.ndarray, rank: int, ranks_per_node: int) -> tuple[int, int]:
    """Return the index of the rank's span that loses rows, and the rank that gets them.

    A rank with room that shares a document comes first, of the same node if there is one; otherwise the shortest span
    goes to the rank with the most room.
    """

    def is_on_other_node(taker: int) -> bool:
        return taker // ranks_per_node != rank // ranks_per_node

    takers = sorted(np.flatnonzero(excess < 0).tolist(), key=lambda taker: (is_on_other_node(taker), taker))
    last_span = {span[1]: index for index, span in enumerate(spans[rank])}  # by document
    for taker in takers:
        shared = [last_span[span[1]] for span in spans[taker] if span[1] in last_span]
        if shared:
            return max(shared, key=lambda index: spans[rank][index][3] - spans[rank][index][2]), taker
    near = [taker for taker in takers if not is_on_other_node(taker)] or takers
    shortest = min(range(len(spans[rank])), key=lambda index: spans[rank][index][3] - spans[rank][index][2])
    return shortest, min(near, key=lambda taker: excess[taker])
