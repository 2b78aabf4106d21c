"""Attention that the ranks of a layout have to compute, without a plan: pairs, and how short tiles are at best."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cost.compute import ComputeCost
from mindspeed_cp.cost.transfers import heads_of
from mindspeed_cp.layout import Documents, Layout
from mindspeed_cp.plan.config import AttentionConfig


def attention_floor(queries: Layout, keys: Documents, cost: ComputeCost) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each rank's attention, forward and backward, fp64 [ranks] each: no plan with these queries takes less.

    A tile has rows of one document, so its shorter side is at most what the rank has of the document's queries.

    Args:
        queries: where queries are computed, and which heads of them.
        keys: lengths of the keys.
        cost: of the kernels.
    """
    attention, spans = cost.attention, queries.spans
    documents = queries.documents
    offset, length = documents.offsets[spans["doc"]], keys.lengths[spans["doc"]].astype(np.float64)
    begin, end = (np.asarray(spans[name] - offset, np.float64) for name in ("start", "stop"))
    seen = _seen_before(end, length, attention) - _seen_before(begin, length, attention)
    share = (heads_of(queries, attention.heads) / attention.heads)[spans["rank"]]
    # rows of each rank and document
    group = spans["rank"] * max(len(documents), 1) + spans["doc"]
    _, of = np.unique(group, return_inverse=True)
    rows = np.bincount(of, end - begin)[of] if len(of) else np.zeros(0)
    work = seen * share * (1.0 + cost.cluster.tile_rows / np.maximum(rows, 1.0))
    each = np.bincount(spans["rank"], work, queries.ranks)
    return cost.attention_seconds(each, np.inf), cost.attention_seconds(each, np.inf, 0, True)


def _seen_before(position: np.ndarray, keys: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Keys that the queries before a position see together, of documents with so many keys, fp64."""
    left, right = (min(float(reach), 1e9) for reach in attention.reach)
    rising = np.clip(keys - (right + 1), 0, position)  # queries that do not yet see the last key
    upto = rising * (rising - 1) / 2 + (right + 1) * rising + (position - rising) * keys
    hidden = np.maximum(position - 1 - left, 0)  # queries that no longer see the first key
    found: np.ndarray = upto - hidden * (hidden + 1) / 2
    return found
