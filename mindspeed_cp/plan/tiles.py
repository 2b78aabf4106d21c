"""Which rows of a slot a rank's queries can see: as few tiles as the mask allows, none of them empty."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import SPAN, Documents
from mindspeed_cp.plan.records import CAUSAL, FULL, TILE


def tiles_between(q_spans: np.ndarray, k_spans: np.ndarray, documents: Documents, mask: str) -> np.ndarray:
    r"""Tiles of a rank's queries against the keys in one slot.

    Both lists of spans ascend in token order, so what a query sees of a slot is one run of rows. A zig-zag rank has two
    chunks, lo and hi, of a document; neighbouring chunks whose tiles make one rectangle become one tile::

        against itself                 against an earlier rank        against a later rank
               lo  hi                        lo' hi'                        lo' hi'
          lo   \                        lo   #   .                     lo   .   .
          hi   #   \                    hi   #   .                     hi   #   #
          one causal square             one full tile                  one full tile

    Args:
        q_spans: records of dtype SPAN, this rank's queries, row by row.
        k_spans: records of dtype SPAN, the slot's keys, row by row.
        documents: the batch.
        mask: "causal" or "full".

    Returns:
        Records of dtype TILE in the order of q rows, `step` and `slot` zero.
    """
    if not len(q_spans) or not len(k_spans):
        return np.empty(0, TILE)
    k_len = k_spans["stop"] - k_spans["start"]
    k_row = np.cumsum(k_len) - k_len

    def rows_before(token: np.ndarray) -> np.ndarray:
        """Rows of the slot with smaller token numbers."""
        i = np.searchsorted(k_spans["start"], token, "right") - 1
        inside = np.minimum(token - k_spans["start"][i], k_len[i])
        return np.where(i >= 0, k_row[i] + inside, 0)

    q_len = q_spans["stop"] - q_spans["start"]
    first = rows_before(documents.offsets[q_spans["doc"]])
    own = np.zeros(len(q_spans), np.int64)
    if mask == "causal":
        last = rows_before(q_spans["stop"])
        own = last - rows_before(q_spans["start"])
        if ((own != 0) & (own != q_len)).any():  # some queries lie partly in the slot; after one cut none does
            return tiles_between(_cut(q_spans, k_spans), k_spans, documents, mask)
    else:
        last = rows_before(documents.offsets[q_spans["doc"] + 1])

    tiles = np.zeros(len(q_spans), TILE)
    tiles["q_row"], tiles["q_rows"] = np.cumsum(q_len) - q_len, q_len
    tiles["k_row"], tiles["k_rows"] = first, last - first
    tiles["mask"] = np.where(own > 0, CAUSAL, FULL)
    seen = last > first
    return _joined(tiles[seen], q_spans["doc"][seen])


def _joined(tiles: np.ndarray, doc: np.ndarray) -> np.ndarray:
    """A tile continues the one before it when its rows follow and it sees the same keys (full) or, for a causal one,
    just its own keys more. (A causal tile that follows a full one is left alone: no kernel has that shape.)"""
    if len(tiles) < 2:
        return tiles
    before, after = tiles[:-1], tiles[1:]
    growth = np.where(after["mask"] == CAUSAL, after["q_rows"], 0)
    follows = (
        (doc[1:] == doc[:-1])
        & (after["q_row"] == before["q_row"] + before["q_rows"])
        & (after["mask"] == before["mask"])
        & (after["k_rows"] == before["k_rows"] + growth)
    )
    first = np.flatnonzero(np.append(True, ~follows))
    out = tiles[first]
    out["q_rows"] = np.add.reduceat(tiles["q_rows"], first)
    out["k_rows"] = tiles["k_rows"][np.append(first[1:], len(tiles)) - 1]
    return out


def _cut(q_spans: np.ndarray, k_spans: np.ndarray) -> np.ndarray:
    """The same queries, cut where a span of keys begins or ends, so that each piece is in the slot wholly or not at
    all."""
    edges = np.unique(np.concatenate([k_spans["start"], k_spans["stop"], q_spans["start"], q_spans["stop"]]))
    lo = np.searchsorted(edges, q_spans["start"])
    pieces = np.searchsorted(edges, q_spans["stop"]) - lo
    of = np.repeat(np.arange(len(q_spans)), pieces)
    edge = lo[of] + np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    out = np.empty(len(of), SPAN)
    out["rank"], out["doc"] = q_spans["rank"][of], q_spans["doc"][of]
    out["start"], out["stop"] = edges[edge], edges[edge + 1]
    return out


def pairs(tiles: np.ndarray) -> np.ndarray:
    """Visible (query, key) pairs of each tile, int64."""
    q, k = tiles["q_rows"], tiles["k_rows"]
    return np.where(tiles["mask"] == CAUSAL, q * (k - q) + q * (q + 1) // 2, q * k)
