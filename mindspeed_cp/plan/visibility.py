"""Which ranks see which keys: what has to travel, and how far."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Layout


def last_hop(layout: Layout, mask: str) -> np.ndarray:
    """For every block the number of hops to the last rank whose queries see any of it, int64 [ranks].

    A causal query sees a block of its document when the block starts before the query's last token. Long documents
    settle nearly every pair, so documents are taken longest first until all pairs are settled.
    """
    n, documents = layout.ranks, layout.documents
    sees = np.eye(n, dtype=bool)  # [rank, block]
    first, final = _borders(layout)
    for doc in np.argsort(-documents.lengths, kind="stable"):
        if documents.lengths[doc] == 0 or sees.all():
            break
        if mask == "causal":
            sees |= first[doc][None, :] < final[doc][:, None]
        else:
            held = final[doc] >= 0
            sees |= held[None, :] & held[:, None]
    hops = (np.arange(n)[:, None] - np.arange(n)[None, :]) % n
    return np.where(sees, hops, 0).max(axis=0)


def seen_elsewhere(layout: Layout, mask: str) -> np.ndarray:
    """For every span whether queries of any other rank see any of it, bool [spans]."""
    spans, (_, final) = layout.spans, _borders(layout)
    doc, rank = spans["doc"], spans["rank"]
    if mask != "causal":
        return (final >= 0).sum(1)[doc] > 1
    latest = final.argmax(1)  # the rank with the document's last query; to itself, the second latest is the other
    highest = final.max(1)
    final[np.arange(len(final)), latest] = -1
    other = np.where(latest[doc] == rank, final.max(1, initial=-1)[doc], highest[doc])
    return spans["start"] < other


def _borders(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """For every document and rank the rank's first token and last token plus one, int64 [documents, ranks]; the number
    of tokens and -1 where the rank holds none."""
    shape = len(layout.documents), layout.ranks
    first, final = np.full(shape, layout.documents.tokens), np.full(shape, -1)
    spans = layout.spans
    np.minimum.at(first, (spans["doc"], spans["rank"]), spans["start"])
    np.maximum.at(final, (spans["doc"], spans["rank"]), spans["stop"])
    return first, final
