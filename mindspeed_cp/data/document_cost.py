"""Modelled seconds of a document in a training step, on one rank of its replica: what `balance.assign` is given.

The model: of a document of n tokens every rank of the replica has an equal share. Its linear layers take time by the
token; its attention takes time by the (query, key) pairs that it sees, and more for each pair where tiles are short
(`mindspeed_cp.cost.ComputeCost`); the backward takes twice and 2.5 times as long. A micro-batch adds the launches of
its kernels. Communication is not in it: most of it is hidden, and what is not grows with the documents as all else.

Sums, products and quotients only, element by element, so every machine gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cost import Cluster, ComputeCost, LayerCost
from mindspeed_cp.plan import AttentionConfig

#: Kernels of a layer beside attention, forward and backward: norms, projections, rotary positions, MLP, residuals.
LINEAR_KERNELS = 36


@dataclass(frozen=True)
class DocumentCost:
    """Modelled seconds of documents and micro-batches on one rank.

    Attributes:
        cluster: what devices can do.
        layers: attention and linear part of each layer, on one tensor-parallel rank.
        ranks: context-parallel ranks, which share every document.
        whole: attention works on whole documents (heads are split, or short documents are on one rank), not on what
            a rank has of them.
        recomputed: forwards of attention, and of the linear part, that the backward computes again: 0 or 1 each.
    """

    cluster: Cluster
    layers: Sequence[tuple[AttentionConfig, LayerCost]]
    ranks: int = 1
    whole: bool = False
    recomputed: tuple[int, int] = (0, 0)

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds of each document, float64 [documents]; lengths int64 [documents]."""
        short = lengths if self.whole else -(-lengths // self.ranks)
        total = np.zeros(len(lengths))
        kinds = list(dict.fromkeys(self.layers))  # layers are alike: each kind is computed once
        for attention, layer in kinds:
            cost = ComputeCost(self.cluster, attention, layer)
            pairs = visible_pairs(lengths, attention) / self.ranks
            tokens = lengths / self.ranks
            of_attention, of_linear = (1 + again for again in self.recomputed)
            seconds = cost.attention_seconds(pairs, short) * of_attention
            seconds = seconds + cost.attention_seconds(pairs, short, backward=True)
            seconds = seconds + cost.linear_seconds(tokens) * of_linear + cost.linear_seconds(tokens, backward=True)
            total = total + seconds * self.layers.count((attention, layer))
        return total

    @property
    def per_micro_batch(self) -> float:
        """Seconds of launches: the linear kernels of all layers, and a call of attention for each rank's block."""
        return len(self.layers) * (LINEAR_KERNELS + 2 * self.ranks) * self.cluster.launch


def visible_pairs(lengths: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """(query, key) pairs that are visible in whole documents, float64 [documents]; int64 lengths below 2**31.

    A query sees itself, min(i, left) keys before it and min(i, right) after it, where i of them exist.
    """
    pairs = lengths.copy()
    for reach in attention.reach:
        inside = np.minimum(reach, np.maximum(lengths - 1, 0))  # positions whose reach the border cuts
        pairs += inside * (inside + 1) // 2 + np.maximum(lengths - 1 - inside, 0) * inside
    return pairs.astype(np.float64)
