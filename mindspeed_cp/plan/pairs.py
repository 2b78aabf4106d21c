"""Counts of the (query, key) pairs that mask and window leave visible, of documents and of runs of their queries."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig


def visible_pairs(lengths: np.ndarray, kv_lengths: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Count the (query, key) pairs of each document that mask and window leave visible.

    The query at position p of n sees keys max(0, p - left) .. min(m - 1, p + right) of m. The count is the difference
    of two sums of clipped lines, in exact int64 arithmetic: every machine gets the same bits.

    Args:
        lengths: queries of each document, int64 [documents], below 2**31.
        kv_lengths: keys of each document, int64 [documents], below 2**31.
        attention: mask and window.

    Returns:
        fp64 [documents].
    """
    left, right = attention.reach
    pairs = _sum_of_clipped_line(lengths, right + 1, kv_lengths) - _sum_of_clipped_line(lengths, -left, kv_lengths)
    return pairs.astype(np.float64)


def document_pairs(queries: Documents, keys: Documents, attention: AttentionConfig) -> np.ndarray:
    """Count the (query, key) pairs of each document's queries that mask and window leave visible, fp64 [documents].

    Args:
        queries, keys: documents by lengths of queries and of keys. In trees and with blocks (causal masks) they are the
            same.
        attention: mask and window.
    """
    if queries.is_plain:
        return visible_pairs(queries.lengths, keys.lengths, attention)
    return run_pairs(np.arange(len(queries)), queries.offsets[:-1], queries.offsets[1:], queries, keys, attention)


def run_pairs(
    doc: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    queries: Documents,
    keys: Documents,
    attention: AttentionConfig,
) -> np.ndarray:
    """Count the visible (query, key) pairs of runs of queries, fp64 [n].

    Args:
        doc: document of each run, int64 [n].
        start, stop: first and last-plus-one token of each run, int64 [n].
        queries, keys, attention: as for :func:`document_pairs`.
    """
    first = queries.first_positions[doc] - queries.offsets[doc]
    keys_on_path = keys.first_positions[doc] + keys.lengths[doc]
    begin, end = (visible_pairs(token + first, keys_on_path, attention) for token in (start, stop))
    pairs = end - begin
    if queries.blocks is not None:
        added = [queries.blocks.pairs_before(token, attention.reach[0]) for token in (start, stop)]
        pairs += added[1] - added[0]
    return pairs


def _sum_of_clipped_line(n: np.ndarray, begin: int, m: np.ndarray) -> np.ndarray:
    """Sum of min(max(p + begin, 0), m) over p = 0 .. n - 1, int64."""
    low = np.clip(-begin, 0, n)  # the line is 0 below this p
    high = np.clip(m - begin, low, n)  # and m from this p on
    count = high - low
    return count * (low + high - 1) // 2 + count * begin + (n - high) * m
