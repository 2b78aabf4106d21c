"""WLB-LLM's packing: rows of any length with equal work, arXiv 2503.17924."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp import AttentionConfig, Documents
from mindspeed_cp.cluster import Cluster, ComputeCost
from mindspeed_cp.layout import assign_to_least_loaded
from mindspeed_cp.plan.pairs import visible_pairs


def rows_of_equal_work(rows: Sequence[Documents], attention: AttentionConfig, cluster: Cluster) -> list[Documents]:
    """Pack the documents of some rows anew into as many: longest first, each into the row with least work so far.

    Work is seconds of attention and of linear layers on one rank. Assumed in its favour: no limit of a row's tokens, so
    that rows differ in length as they need, where the paper has one of memory. Left out: outliers that wait for later
    batches, since all systems run the same documents.

    Args:
        rows: packed rows.
        attention: of the layer.
        cluster: its speeds.
    """
    lengths = np.concatenate([row.lengths for row in rows])
    cost = ComputeCost(cluster, attention)
    work = cost.attention_seconds(visible_pairs(lengths, lengths, attention), lengths)
    work = work + cost.linear_layer_seconds(lengths)
    order = np.argsort(-work, kind="stable")
    row_of = np.zeros(len(lengths), np.int64)
    row_of[order] = assign_to_least_loaded(work[order].tolist(), [0.0] * len(rows))
    return [Documents(lengths[row_of == number]) for number in range(len(rows))]
