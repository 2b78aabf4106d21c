"""Layouts that no builder makes."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import TOKEN_SPAN, Documents, Layout


def equal_tokens(documents: Documents, ranks: int) -> Layout:
    """Cut the packed row into equal shares (to one token), across documents."""
    cuts = np.arange(ranks + 1) * documents.tokens // ranks
    edges = np.unique(np.concatenate([cuts, documents.offsets]))
    start, stop = edges[:-1], edges[1:]
    spans = np.empty(len(start), TOKEN_SPAN)
    spans["rank"] = np.searchsorted(cuts, start, "right") - 1
    spans["doc"], spans["start"], spans["stop"] = documents.document_of(start), start, stop
    return Layout(documents, ranks, spans)
