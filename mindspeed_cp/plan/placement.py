"""Layouts for the algorithms, by name; `balanced` keeps short documents whole."""

from __future__ import annotations

import heapq

import numpy as np

from mindspeed_cp.layout import Documents, Layout, contiguous, zigzag
from mindspeed_cp.plan.config import AttentionConfig

LAYOUTS = ("zigzag", "contiguous", "balanced")

#: Documents longer than these shares of a rank's fair part of all work are cut over all ranks; all are tried.
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05)

#: A cut that wins less than this over the best one so far, of fewer documents cut, is not worth its messages.
WORTH = 0.01


def place(
    name: str, queries: Documents, keys: Documents, ranks: int, attention: AttentionConfig
) -> tuple[Layout, Layout]:
    """Layouts of queries and of keys over `ranks` ranks, one object where the documents are the same.

    Args:
        name: "zigzag", "contiguous" or "balanced".
        queries: lengths of the queries.
        keys: lengths of the keys.
        ranks: how many ranks share the tokens.
        attention: what is computed.
    """
    groups = None
    if name == "balanced":
        groups = balanced_groups(visible_pairs(queries, keys, attention), queries.lengths + keys.lengths, ranks)
    make = contiguous if name == "contiguous" else zigzag
    held = make(queries, ranks, groups)
    return held, held if keys == queries else make(keys, ranks, groups)


def balanced_groups(work: np.ndarray, rows: np.ndarray, ranks: int) -> list[np.ndarray]:
    """For each document the ranks that share it: one of them, or all.

    The longest documents are cut over all ranks, which all get an equal part of them; the others go, longest first,
    each to the rank with the least work (Graham 1969). How long a document must be to be cut is tried from the
    longest on down, as long as the busiest rank gains by it.

    Args:
        work: of each document, [documents].
        rows: tokens of each document, queries and keys.
        ranks: how many there are.
    """
    everyone = np.arange(ranks)
    order = np.argsort(-work, kind="stable")
    total, fair = float(work.sum()), float(work.sum()) / ranks
    best: tuple[float, int, list[int]] | None = None
    cuts = sorted({int(np.searchsorted(-work[order], -share * fair, "left")) for share in SHARES})
    for cut in cuts:
        loads = [(float(work[order[:cut]].sum()) / ranks, 0, rank) for rank in range(ranks)]  # ascending: a heap
        owner = []
        for doc in order[cut:].tolist():
            load, tokens, rank = loads[0]
            owner.append(rank)
            heapq.heapreplace(loads, (load + float(work[doc]), tokens + int(rows[doc]), rank))
        busiest = max(loads)[0]
        if best is None or busiest < best[0] - WORTH * fair:
            best = busiest, cut, owner
        if total == 0 or busiest <= (1 + WORTH) * fair:
            break
    assert best is not None
    groups: list[np.ndarray] = [everyone] * len(work)
    for doc, rank in zip(order[best[1] :].tolist(), best[2], strict=True):
        groups[doc] = np.array([rank])
    return groups


def visible_pairs(queries: Documents, keys: Documents, attention: AttentionConfig) -> np.ndarray:
    """(query, key) pairs of each document that the mask lets see each other, fp64 [documents].

    Queries at positions 0 .. n-1 see keys max(0, p - left) .. min(m - 1, p + right): the sum of a clipped line on each
    side.
    """
    n, m = queries.lengths.astype(float), keys.lengths.astype(float)
    left, right = attention.reach
    return _clipped_sum(n, right + 1.0, m) - _clipped_sum(n, -float(left), m)


def _clipped_sum(n: np.ndarray, begin: float, m: np.ndarray) -> np.ndarray:
    """Sum over p = 0 .. n-1 of p + begin, clipped to 0 .. m."""
    low = np.clip(-begin, 0, n)  # below this p it is 0
    high = np.clip(m - begin, low, n)  # from here on it is m
    count = high - low
    return count * (low + high - 1) / 2 + count * begin + (n - high) * m
