"""Split of a rank's local block: some of it in the first step, the rest in steps that have no other work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.layout import Layout
from mindspeed_cp.layout.runs import group_starts
from mindspeed_cp.plan.problem import AttentionConfig
from mindspeed_cp.plan.records import CONTENT, sorted_contents

#: Share of a rank's work that waits, in the backward of fetched keys, for the steps in which the last gradients return.
#: It is part of the local block, at most half of it.
LATE_SHARE = 0.25


def split_local_block(
    queries: Layout,
    keys: Layout,
    attention: AttentionConfig,
    contents: np.ndarray,
    spans: np.ndarray,
    shares: Sequence[tuple[int, np.ndarray | float]],
) -> tuple[np.ndarray, np.ndarray]:
    """Return contents, and their spans, in which every rank computes shares of its local block in several steps.

    The last gradients travel when no fetched keys are left to compute, and would otherwise have no work to hide behind.
    The block is cut at the rows where its work (its rows, under a window) reaches the shares. A cut may lie inside a
    span, and moves to the border of a span that it nearly reaches. Under dropout the block stays whole, because some
    kernels repeat the dropped weights of a forward call only for the same tiles.

    Args:
        queries: layout of the queries.
        keys: layout of the keys.
        attention: attention of one layer.
        contents: contents of the forward; slot 0 is a rank's local block.
        spans: spans of the contents; begin with those of `keys`.
        shares: (step, share of the work) in the order of steps, for all ranks or fp64 [ranks]; the shares add up to 1.
    """
    if attention.dropout > 0:
        return contents, spans
    work, seen = _span_work(queries, keys, attention)
    rows, work_before = keys.spans["stop"] - keys.spans["start"], np.concatenate([[0], np.cumsum(work)])

    def position(begin: int, stop: int, share: float) -> tuple[int, int]:
        """Return the span, and the row of it, before which a share of the work of spans begin .. stop-1 lies."""
        before, total = int(work_before[begin]), int(work_before[stop]) - int(work_before[begin])
        goal = before + int(total * share)
        span = min(int(np.searchsorted(work_before, goal, "right")) - 1, stop - 1)
        missing, most, seen_by = goal - int(work_before[span]), int(rows[span]), int(seen[span])
        if attention.is_triangular:  # x keys of the span are seen x * seen - x * (x - 1) / 2 times
            row = int(seen_by - np.sqrt(max(0, seen_by**2 - 2 * missing)))
        else:
            row = missing // max(1, seen_by)
        if row < most // 8:  # nearly none, or all
            return span, 0
        return (span + 1, 0) if row > most - most // 8 or row == most else (span, row)

    ends = np.cumsum([share + np.zeros(keys.ranks) for _, share in shares], axis=0).T.tolist()
    local: list[tuple[int, ...]] = []  # contents
    cut_spans: list[int] = []  # index of each span that is cut, ascending, and the token before which it is cut
    tokens: list[int] = []
    for rank in np.flatnonzero(np.diff(keys.span_offsets)).tolist():
        begin, stop = int(keys.span_offsets[rank]), int(keys.span_offsets[rank + 1])
        first, first_row = begin, 0  # span, and row of it, at which the next part begins
        for (step, _), end in zip(shares, [*ends[rank][:-1], None], strict=True):
            last, last_row = (stop, 0) if end is None else position(begin, stop, end)
            if (last, last_row) <= (first, first_row):
                continue
            first_content = first + len(cut_spans)
            if last_row:
                cut_spans.append(last)
                tokens.append(int(keys.spans["start"][last]) + last_row)
            row = int(keys.span_first_rows[first]) + first_row
            local.append((step, rank, 0, row, first_content, last + len(cut_spans) - first_content))
            first, first_row = last, last_row
    cuts = np.array(cut_spans, np.int64)
    spans = np.insert(spans, cuts + 1, spans[cuts])
    before_cut = cuts + np.arange(len(cuts))
    spans["stop"][before_cut] = tokens
    spans["start"][before_cut + 1] = tokens
    others = contents[contents["slot"] > 0].copy()
    cuts_before = np.searchsorted(cuts, others["first"])
    others["count"] += np.searchsorted(cuts, others["first"] + others["count"]) - cuts_before
    others["first"] += cuts_before
    local_contents = np.array(local, CONTENT)
    return sorted_contents(np.concatenate([local_contents[local_contents["count"] > 0], others])), spans


def local_block_work(queries: Layout, keys: Layout, attention: AttentionConfig) -> np.ndarray:
    """Return the visible pairs of every rank's local block (its rows, under a window), fp64 [ranks]."""
    work, _ = _span_work(queries, keys, attention)
    return np.bincount(keys.spans["rank"], work, keys.ranks)


def _span_work(queries: Layout, keys: Layout, attention: AttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the work of the rank's own queries with each span of keys, and how many of them see its first key, int64
    [spans] each."""
    rows, spans = keys.spans["stop"] - keys.spans["start"], keys.spans
    if attention.window is not None:
        return rows, np.ones(len(spans), np.int64)
    if attention.is_triangular:
        before = np.cumsum(rows) - rows
        starts = group_starts(spans["rank"], spans["doc"])
        size = np.diff(np.append(starts, len(spans)))  # spans of one rank and document
        own_queries = np.repeat(np.add.reduceat(rows, starts), size) if len(spans) else rows
        seen = own_queries - (before - np.repeat(before[starts], size))  # at or after the first key of the span
        return rows * seen - rows * (rows - 1) // 2, seen
    query_rows = np.zeros((keys.ranks, len(keys.documents)), np.int64)
    np.add.at(query_rows, (queries.spans["rank"], queries.spans["doc"]), queries.spans["stop"] - queries.spans["start"])
    own_queries = query_rows[spans["rank"], spans["doc"]]
    return rows * own_queries, own_queries
