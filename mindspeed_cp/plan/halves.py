"""A rank's own block in shares: some for the first step, the rest for those with nothing else left to do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.config import AttentionConfig
from mindspeed_cp.plan.records import CONTENT, sorted_contents


def own_block_in_two_halves(
    queries: Layout,
    keys: Layout,
    attention: AttentionConfig,
    contents: np.ndarray,
    table: np.ndarray,
    last_step: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Contents, and the spans they refer to, in which every rank computes about half of its own block in the last
    step; see :func:`own_block_in_shares`."""
    return own_block_in_shares(queries, keys, attention, contents, table, [(0, 0.5), (last_step, 0.5)])


def own_block_in_shares(
    queries: Layout,
    keys: Layout,
    attention: AttentionConfig,
    contents: np.ndarray,
    table: np.ndarray,
    shares: Sequence[tuple[int, np.ndarray | float]],
) -> tuple[np.ndarray, np.ndarray]:
    """Contents, and the spans they refer to, in which every rank computes shares of its own block in several steps.

    The last gradients travel home when no received keys are left to compute, and would otherwise have no work to hide
    behind. The own block is cut at the rows where its work reaches the shares (its rows, under a window); a cut lies
    inside a span when the rank has few of them, and moves to the border of a span that it nearly reaches. Under dropout
    the block stays whole: vendors' kernels draw the dropped weights anew from what they kept of the same call in the
    forward, so that the backward must have the forward's tiles.

    Args:
        queries: layout of the queries.
        keys: layout of the keys.
        attention: what is computed.
        contents: of the forward; slot 0 is a rank's own block.
        table: spans that the contents refer to; begins with those of `keys`.
        shares: (step, share of the work) in the order of steps, for all ranks or fp64 [ranks]; the shares add up to 1.
    """
    if attention.dropout > 0:
        return contents, table
    rows, spans = keys.spans["stop"] - keys.spans["start"], keys.spans
    before = np.cumsum(rows) - rows
    work, seen = _work_of_spans(queries, keys, attention)
    done = np.concatenate([[0], np.cumsum(work)])
    causal = attention.mask == "causal" and attention.window is None
    every = np.zeros(keys.ranks)
    ends = np.cumsum([share + every for _, share in shares], axis=0).T.tolist()

    cut_spans: list[int] = []
    cut_tokens: list[int] = []
    parts = []
    for rank in np.flatnonzero(np.diff(keys.bounds)).tolist():
        lo, hi = int(keys.bounds[rank]), int(keys.bounds[rank + 1])
        total = int(done[hi]) - int(done[lo])
        first, first_row = lo, 0  # the next part begins at this span, and at this row of it
        for (step, _), end in zip(shares, [*ends[rank][:-1], None], strict=True):
            at, row = hi, 0
            if end is not None:
                goal = int(done[lo]) + int(total * end)
                at = min(int(np.searchsorted(done, goal, "right")) - 1, hi - 1)
                row = _row_of(goal - int(done[at]), int(rows[at]), int(seen[at]), causal)
                at, row = (at + 1, 0) if row == rows[at] else (at, row)
            if (at, row) <= (first, first_row):
                continue
            begin = first + len(cut_spans)
            if row:
                cut_spans.append(at)
                cut_tokens.append(int(spans["start"][at]) + row)
            row_before = int(before[first] - before[lo]) + first_row
            parts.append((step, rank, 0, row_before, begin, at + len(cut_spans) - begin))
            first, first_row = at, row

    table, places = _cut(table, cut_spans, cut_tokens)
    others = contents[contents["slot"] > 0].copy()
    others["count"] += np.searchsorted(places, others["first"] + others["count"]) - np.searchsorted(
        places, others["first"]
    )
    others["first"] += np.searchsorted(places, others["first"])
    own = np.array(parts, CONTENT)
    return sorted_contents(np.concatenate([own[own["count"] > 0], others])), table


def own_work(queries: Layout, keys: Layout, attention: AttentionConfig) -> np.ndarray:
    """Visible pairs of every rank's own block (its rows, under a window), fp64 [ranks]."""
    work, _ = _work_of_spans(queries, keys, attention)
    return np.bincount(keys.spans["rank"], work, keys.ranks)


def _row_of(missing: int, rows: int, seen: int, causal: bool) -> int:
    """After how many rows of a span so much work is done; all or none of them where it is nearly so."""
    if causal:  # x keys of the span are seen x * seen - x * (x - 1) / 2 times
        row = int(seen - np.sqrt(max(0, seen**2 - 2 * missing)))
    else:
        row = missing // max(1, seen)
    return 0 if row < rows // 8 else rows if row > rows - rows // 8 else row


def _work_of_spans(queries: Layout, keys: Layout, attention: AttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """For each span of the keys the work of the rank's own queries against it, and how many of these see its first
    key."""
    rows, spans = keys.spans["stop"] - keys.spans["start"], keys.spans
    if attention.window is not None:
        return rows, np.ones(len(spans), np.int64)
    if attention.mask == "causal":
        before = np.cumsum(rows) - rows
        group = np.flatnonzero(np.append(True, (np.diff(spans["rank"]) != 0) | (np.diff(spans["doc"]) != 0)))
        group = group[: len(spans)]
        size = np.diff(np.append(group, len(spans)))  # spans of one rank and document
        own = np.repeat(np.add.reduceat(rows, group), size) if len(spans) else rows
        after = own - (before - np.repeat(before[group], size))  # queries at or after the first key of the span
        return rows * after - rows * (rows - 1) // 2, after
    held = np.zeros((keys.ranks, len(keys.documents)), np.int64)
    np.add.at(held, (queries.spans["rank"], queries.spans["doc"]), queries.spans["stop"] - queries.spans["start"])
    own = held[spans["rank"], spans["doc"]]
    return rows * own, own


def _cut(table: np.ndarray, cut_spans: list[int], cut_tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The table with spans cut at tokens, and the numbers of the cut spans (once for each cut), ascending."""
    places = np.array(cut_spans, np.int64)
    out = np.insert(table, places + 1, table[places])
    where = places + np.arange(len(places))
    out["stop"][where] = cut_tokens
    out["start"][where + 1] = cut_tokens
    return out, places
