"""Layouts of queries and keys by name; "balanced" keeps short documents, and small trees, whole."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from mindspeed_cp.layout import Documents, Layout, assign_to_least_loaded, contiguous, zigzag
from mindspeed_cp.plan.problem import AttentionConfig, document_pairs

LayoutName = Literal["zigzag", "contiguous", "balanced"]
LAYOUT_NAMES: tuple[str, ...] = get_args(LayoutName)

#: Documents with more work than these multiples of a rank's equal share are cut over all ranks; all are tried.
CUT_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05)

#: Gain, as a fraction of an equal share, that justifies the messages of cutting more documents.
MIN_GAIN = 0.01


def build_layouts(
    name: str, queries: Documents, keys: Documents, ranks: int, attention: AttentionConfig
) -> tuple[Layout, Layout]:
    """Return the layouts of queries and of keys, one object if the documents are the same.

    Args:
        name: "zigzag", "contiguous" or "balanced".
        queries: documents by lengths of queries.
        keys: documents by lengths of keys.
        ranks: number of ranks that share the tokens.
        attention: attention of one layer.
    """
    doc_ranks = None
    if name == "balanced":
        work = queries.tree_sums(document_pairs(queries, keys, attention))
        tree_ranks = balanced_doc_ranks(work, queries.tree_sums(queries.lengths + keys.lengths), ranks)
        doc_ranks = [tree_ranks[tree] for tree in queries.tree_numbers.tolist()]
    build = contiguous if name == "contiguous" else zigzag
    layout = build(queries, ranks, doc_ranks)
    return layout, layout if keys == queries else build(keys, ranks, doc_ranks)


def balanced_doc_ranks(work: np.ndarray, rows: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Return the ranks that share each document: one rank, or all.

    The longest documents are cut evenly over all ranks. The others go, longest first, each to the rank with the least
    work (Graham 1969). More and more documents are cut as long as the busiest rank gains by it.

    Args:
        work: work of each document, [documents].
        rows: rows of queries and keys of each document; of ranks with equal work, the one with fewer rows is taken.
        ranks: number of ranks.
    """
    order = np.argsort(-work, kind="stable")
    total, fair = float(work.sum()), float(work.sum()) / ranks
    best: tuple[float, int, list[int]] | None = None  # load of the busiest rank, number of cut documents, owners
    for cut in sorted({int(np.searchsorted(-work[order], -share * fair, "left")) for share in CUT_SHARES}):
        loads = [float(work[order[:cut]].sum()) / ranks] * ranks
        whole = order[cut:]
        owners = assign_to_least_loaded(work[whole].tolist(), loads, ties=rows[whole].tolist())
        busiest = max(loads)
        if best is None or busiest < best[0] - MIN_GAIN * fair:
            best = busiest, cut, owners
        if total == 0 or busiest <= (1 + MIN_GAIN) * fair:
            break
    assert best is not None
    _, cut, owners = best
    doc_ranks = [np.arange(ranks)] * len(work)
    for doc, rank in zip(order[cut:].tolist(), owners, strict=True):
        doc_ranks[doc] = np.array([rank])
    return doc_ranks
