"""Modelled seconds of a document in a training step, on one rank of its replica: the cost for `balance.assign`.

Every rank of the replica has an equal share of the document. The time of linear layers is proportional to tokens, that
of attention to the visible (query, key) pairs, with a higher rate for short tiles (`mindspeed_cp.cluster.ComputeCost`);
the backward takes 2 and 2.5 times as long. A micro-batch adds the launches of its kernels. Communication is left out:
most of it is hidden, and the rest grows with the documents, as compute does.

Only elementwise sums, products and quotients are used, so every machine gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.problem import document_pairs

#: Kernels of a layer besides attention, forward and backward: norms, projections, rotary positions, MLP, residuals.
LINEAR_KERNELS = 36


@dataclass(frozen=True)
class DocumentCost:
    """Modelled seconds of documents and micro-batches on one rank.

    Attributes:
        cluster: the devices.
        layers: attention and linear part of each layer, on one tensor-parallel rank.
        ranks: number of context-parallel ranks, which share every document.
        whole_documents: True if attention tiles are as long as documents, because heads are split or short documents
            are on one rank; False if they are as long as a rank's share of a document.
        recomputed: forwards of attention and of the linear part that the backward computes again, 0 or 1 each.
    """

    cluster: Cluster
    layers: Sequence[tuple[AttentionConfig, LayerCost]]
    ranks: int = 1
    whole_documents: bool = False
    recomputed: tuple[int, int] = (0, 0)

    def __call__(self, given: np.ndarray | Documents) -> np.ndarray:
        """Return the seconds of each document, float64 [documents].

        Args:
            given: lengths, int64 [documents]; or documents, of which those that continue others also attend to these.
        """
        documents = given if isinstance(given, Documents) else Documents(given)
        lengths = documents.lengths
        short = lengths if self.whole_documents else -(-lengths // self.ranks)
        total = np.zeros(len(lengths))
        for attention, layer in dict.fromkeys(self.layers):  # equal layers are computed once
            cost = ComputeCost(self.cluster, attention, layer)
            pairs = document_pairs(documents, documents, attention) / self.ranks
            tokens = lengths / self.ranks
            attention_forwards, linear_forwards = (1 + again for again in self.recomputed)
            seconds = cost.attention_seconds(pairs, short) * attention_forwards
            seconds = seconds + cost.attention_seconds(pairs, short, backward=True)
            seconds = (
                seconds
                + cost.linear_layer_seconds(tokens) * linear_forwards
                + cost.linear_layer_seconds(tokens, backward=True)
            )
            total = total + seconds * self.layers.count((attention, layer))
        return total

    @property
    def per_micro_batch(self) -> float:
        """Seconds of kernel launches in a micro-batch: linear kernels of all layers, and an attention call for each
        rank's block, forward and backward."""
        return len(self.layers) * (LINEAR_KERNELS + 2 * self.ranks) * self.cluster.launch
