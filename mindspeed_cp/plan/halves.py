"""A rank's own block in two halves, one for the first step and one for the last."""

from __future__ import annotations

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
    """Contents, and the spans they refer to, in which every rank computes about half of its own block in the last step.

    The last gradients travel home in that step, and would otherwise have no work to hide behind. The own block is cut
    in one place, at the row where its work is halved (its rows, under a window); the half point lies inside a span when
    the rank has few of them. Under dropout the block stays whole: vendors' kernels draw the dropped weights anew from
    what they kept of the same call in the forward, so that the backward must have the forward's tiles.

    Args:
        queries: layout of the queries.
        keys: layout of the keys.
        attention: what is computed.
        contents: of the forward; slot 0 is a rank's own block.
        table: spans that the contents refer to; begins with those of `keys`.
        last_step: step of the second halves.
    """
    if attention.dropout > 0:
        return contents, table
    rows, spans = keys.spans["stop"] - keys.spans["start"], keys.spans
    before = np.cumsum(rows) - rows
    causal = attention.mask == "causal" and attention.window is None
    if attention.window is not None:
        own = np.ones(len(spans), np.int64)
    elif causal:
        group = np.flatnonzero(np.append(True, (np.diff(spans["rank"]) != 0) | (np.diff(spans["doc"]) != 0)))
        size = np.diff(np.append(group, len(spans)))  # spans of one rank and document
        own = np.repeat(np.add.reduceat(rows, group), size)  # rows of the rank in the span's document
        after = own - (before - np.repeat(before[group], size))  # queries at or after the first key of the span
    else:
        held = np.zeros((keys.ranks, len(keys.documents)), np.int64)
        np.add.at(held, (queries.spans["rank"], queries.spans["doc"]), queries.spans["stop"] - queries.spans["start"])
        own = held[spans["rank"], spans["doc"]]
    work = rows * after - rows * (rows - 1) // 2 if causal else rows * own
    done = np.concatenate([[0], np.cumsum(work)])

    cut_spans, cut_tokens, parts = [], [], []
    for rank in range(keys.ranks):
        lo, hi = int(keys.bounds[rank]), int(keys.bounds[rank + 1])
        if lo == hi:
            continue
        half = (int(done[lo]) + int(done[hi])) // 2
        at = min(int(np.searchsorted(done, half, "right")) - 1, hi - 1)
        missing, n = half - int(done[at]), int(rows[at])
        if causal:  # x keys of the span are seen x * after - x * (x - 1) / 2 times
            row = int(after[at] - np.sqrt(max(0, int(after[at]) ** 2 - 2 * missing)))
        else:
            row = missing // max(1, int(own[at]))
        row = 0 if row < n // 8 else n if row > n - n // 8 else row
        if 0 < row < n:
            cut_spans.append(at)
            cut_tokens.append(int(spans["start"][at]) + row)
        spans_before = at - lo + (row > 0)
        first = lo + len(cut_spans) - (0 < row < n)
        count = hi - lo + (0 < row < n)
        rows_before = int(before[at] - before[lo]) + row
        parts += [
            (0, rank, 0, 0, first, spans_before),
            (last_step, rank, 0, rows_before, first + spans_before, count - spans_before),
        ]

    table = np.insert(table, np.array(cut_spans, np.int64) + 1, spans[cut_spans])
    where = np.array(cut_spans, np.int64) + np.arange(len(cut_spans))
    table["stop"][where], table["start"][where + 1] = cut_tokens, cut_tokens
    shifted = contents[contents["slot"] > 0].copy()
    shifted["count"] += np.searchsorted(cut_spans, shifted["first"] + shifted["count"]) - np.searchsorted(
        cut_spans, shifted["first"]
    )
    shifted["first"] += np.searchsorted(cut_spans, shifted["first"])
    halves = np.array(parts, CONTENT)
    return sorted_contents(np.concatenate([halves[halves["count"] > 0], shifted])), table
