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
    cuts = _Cuts(queries, keys, attention)
    ends = np.cumsum([share + np.zeros(keys.ranks) for _, share in shares], axis=0).T.tolist()
    steps = [step for step, _ in shares]
    local = [
        content
        for rank in np.flatnonzero(np.diff(keys.span_offsets)).tolist()
        for content in cuts.contents_of(rank, steps, ends[rank][:-1])
    ]
    cut_spans = np.array(cuts.spans, np.int64)  # one for each cut
    spans = np.insert(spans, cut_spans + 1, spans[cut_spans])
    before_cut = cut_spans + np.arange(len(cut_spans))
    spans["stop"][before_cut] = cuts.tokens
    spans["start"][before_cut + 1] = cuts.tokens
    others = contents[contents["slot"] > 0].copy()
    cuts_before = np.searchsorted(cut_spans, others["first"])
    others["count"] += np.searchsorted(cut_spans, others["first"] + others["count"]) - cuts_before
    others["first"] += cuts_before
    local_contents = np.array(local, CONTENT)
    return sorted_contents(np.concatenate([local_contents[local_contents["count"] > 0], others])), spans


class _Cuts:
    """Cuts of the local blocks, collected rank by rank.

    Attributes:
        spans, tokens: index of each span that is cut, ascending, and the token before which it is cut.
    """

    def __init__(self, queries: Layout, keys: Layout, attention: AttentionConfig) -> None:
        self._keys, self._triangular = keys, attention.is_triangular
        self._rows = keys.spans["stop"] - keys.spans["start"]
        work, self._seen = _span_work(queries, keys, attention)
        self._work_before = np.concatenate([[0], np.cumsum(work)])
        self.spans: list[int] = []
        self.tokens: list[int] = []

    def contents_of(self, rank: int, steps: Sequence[int], ends: Sequence[float]) -> list[tuple[int, ...]]:
        """Cut the block of a rank and return its contents.

        Args:
            rank: rank with a block.
            steps: step of each part.
            ends: share of the work before the end of each part but the last.
        """
        keys = self._keys
        contents: list[tuple[int, ...]] = []
        begin, stop = int(keys.span_offsets[rank]), int(keys.span_offsets[rank + 1])
        first, first_row = begin, 0  # span, and row of it, at which the next part begins
        for step, end in zip(steps, [*ends, None], strict=True):
            last, last_row = (stop, 0) if end is None else self._position(begin, stop, end)
            if (last, last_row) <= (first, first_row):
                continue
            first_content = first + len(self.spans)
            if last_row:
                self.spans.append(last)
                self.tokens.append(int(keys.spans["start"][last]) + last_row)
            row = int(keys.span_first_rows[first]) + first_row
            contents.append((step, rank, 0, row, first_content, last + len(self.spans) - first_content))
            first, first_row = last, last_row
        return contents

    def _position(self, begin: int, stop: int, share: float) -> tuple[int, int]:
        """Return the span, and the row of it, before which a share of the work of spans begin .. stop-1 lies."""
        before, total = int(self._work_before[begin]), int(self._work_before[stop]) - int(self._work_before[begin])
        goal = before + int(total * share)
        span = min(int(np.searchsorted(self._work_before, goal, "right")) - 1, stop - 1)
        missing, rows = goal - int(self._work_before[span]), int(self._rows[span])
        seen = int(self._seen[span])
        if self._triangular:  # x keys of the span are seen x * seen - x * (x - 1) / 2 times
            row = int(seen - np.sqrt(max(0, seen**2 - 2 * missing)))
        else:
            row = missing // max(1, seen)
        if row < rows // 8:  # nearly none, or all
            return span, 0
        return (span + 1, 0) if row > rows - rows // 8 or row == rows else (span, row)


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
