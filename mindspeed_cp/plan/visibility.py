"""Which ranks see which keys: what has to travel, and how far."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Layout, merged, overlaps
from mindspeed_cp.plan.config import AttentionConfig


def visible_tokens(queries: Layout, keys: Layout, attention: AttentionConfig) -> list[np.ndarray]:
    """For every rank the keys that its queries see: runs of key tokens, int64 [runs, 2] (first, last plus one),
    ascending, apart from each other."""
    spans, left, right = queries.spans, *attention.reach
    offset, k_offset = queries.documents.offsets[spans["doc"]], keys.documents.offsets[spans["doc"]]
    length = keys.documents.lengths[spans["doc"]]
    first = k_offset + np.clip(spans["start"] - offset - left, 0, length)
    last = k_offset + np.clip(spans["stop"] - offset + right, 0, length)
    out = []
    for rank in range(queries.ranks):
        lo, hi = queries.bounds[rank], queries.bounds[rank + 1]
        out.append(merged(np.stack([first[lo:hi], last[lo:hi]], 1)))
    return out


def cut_to(spans: np.ndarray, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What of the spans lies in the runs.

    Args:
        spans: records of dtype SPAN, ascending in token order.
        runs: [n, 2], ascending, apart from each other.

    Returns:
        Pieces (records of dtype SPAN, ascending), and for each piece the number of its span.
    """
    of, _, first, last = overlaps(spans["start"], spans["stop"], runs[:, 0], runs[:, 1])
    pieces = spans[of]
    pieces["start"], pieces["stop"] = first, last
    return pieces, of


def sees(queries: Layout, keys: Layout, attention: AttentionConfig) -> np.ndarray:
    """Whether any query of a rank sees any key of another rank's block, bool [rank, block].

    A long document settles every pair where it is on all ranks, so the longest one is tried alone first.
    """
    out = np.zeros((queries.ranks, keys.ranks), bool)
    if not len(keys.spans):
        return out
    spans = keys.spans[np.argsort(keys.spans["start"], kind="stable")]
    longest = spans[spans["doc"] == int(np.argmax(keys.documents.lengths))]
    runs = visible_tokens(queries, keys, attention)
    for some in (longest, spans):
        for rank, mine in enumerate(runs):
            if len(mine):
                touched = np.searchsorted(mine[:, 0], some["stop"], "left") > np.searchsorted(
                    mine[:, 1], some["start"], "right"
                )
                out[rank, some["rank"][touched]] = True
        if out.all():
            break
    return out


def seen_elsewhere(queries: Layout, keys: Layout, attention: AttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """The parts of every block that some other rank's queries see.

    Returns:
        Pieces (records of dtype SPAN, in the order of the layout's spans), and for each piece the number of its span.
    """
    runs = visible_tokens(queries, keys, attention)
    if queries.same_as(keys) and queries.documents == keys.documents:  # every query sees its own key
        twice = _covered_twice(runs)
        seen = [twice] * keys.ranks
    else:
        none = np.zeros((0, 2), np.int64)
        seen = [
            merged(np.concatenate([none, *(runs[rank] for rank in range(queries.ranks) if rank != block)]))
            for block in range(keys.ranks)
        ]
    found = [cut_to(keys.of(block), seen[block]) for block in range(keys.ranks)]
    pieces = np.concatenate([x[0] for x in found])
    return pieces, np.concatenate([x[1] + keys.bounds[block] for block, x in enumerate(found)])


def _covered_twice(runs: list[np.ndarray]) -> np.ndarray:
    """Where the runs of at least two lists overlap, as ascending runs."""
    every = np.concatenate(runs)
    edges = np.concatenate([every[:, 0], every[:, 1]])
    rise = np.repeat(np.array([1, -1]), len(every))
    order = np.argsort(edges, kind="stable")
    edges, depth = edges[order], np.cumsum(rise[order])
    if len(edges) < 2:
        return np.zeros((0, 2), np.int64)
    inside = np.flatnonzero((depth[:-1] >= 2) & (edges[1:] > edges[:-1]))
    return merged(np.stack([edges[inside], edges[inside + 1]], 1))
