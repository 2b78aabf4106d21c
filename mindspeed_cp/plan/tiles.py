"""Which rows of a slot a rank's queries can see: as few tiles as the mask allows, none of them empty."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import SPAN, Documents, expand
from mindspeed_cp.plan.config import AttentionConfig
from mindspeed_cp.plan.records import BAND, CAUSAL, FULL, TILE


def tiles_between(
    q_spans: np.ndarray,
    k_spans: np.ndarray,
    documents: Documents,
    attention: AttentionConfig,
    kv_documents: Documents | None = None,
) -> np.ndarray:
    r"""Tiles of a rank's queries against the keys in one slot.

    Both lists of spans ascend in token order, so what a query sees of a slot is one run of rows. A zig-zag rank has two
    chunks, lo and hi, of a document; neighbouring chunks whose tiles make one rectangle become one tile::

        against itself                 against an earlier rank        against a later rank
               lo  hi                        lo' hi'                        lo' hi'
          lo   \                        lo   #   .                     lo   .   .
          hi   #   \                    hi   #   .                     hi   #   #
          one causal square             one full tile                  one full tile

    Windows, ALiBi and dropout need positions, so there every tile is one run of positions against another.

    Args:
        q_spans: records of dtype SPAN, this rank's queries, row by row.
        k_spans: records of dtype SPAN, the slot's keys, row by row.
        documents: the batch.
        attention: its mask and window say what is visible.
        kv_documents: lengths of the keys where they differ from those of the queries; full masks only.

    Returns:
        Records of dtype TILE in the order of q rows, `step` and `slot` zero.
    """
    if not len(q_spans) or not len(k_spans):
        return np.empty(0, TILE)
    if attention.by_position:
        return _by_position(q_spans, k_spans, documents, kv_documents or documents, attention)
    return _by_rows(q_spans, k_spans, documents, kv_documents or documents, attention.mask)


def _by_rows(
    q_spans: np.ndarray, k_spans: np.ndarray, documents: Documents, kv_documents: Documents, mask: str
) -> np.ndarray:
    k_start, k_stop = (np.ascontiguousarray(k_spans[name]) for name in ("start", "stop"))
    q_start, q_stop, doc = (np.ascontiguousarray(q_spans[name]) for name in ("start", "stop", "doc"))
    k_len, q_len = k_stop - k_start, q_stop - q_start
    k_row = np.cumsum(k_len) - k_len

    def rows_before(token: np.ndarray) -> np.ndarray:
        """Rows of the slot with smaller token numbers."""
        i = np.searchsorted(k_start, token, "right") - 1
        inside = np.minimum(token - k_start[i], k_len[i])
        return np.where(i >= 0, k_row[i] + inside, 0)

    first = rows_before(kv_documents.offsets[doc])
    if mask == "causal":
        last = rows_before(q_stop)
        own = last - rows_before(q_start)
        if ((own != 0) & (own != q_len)).any():  # some queries lie partly in the slot; after one cut none does
            return _by_rows(_cut(q_spans, k_spans), k_spans, documents, kv_documents, mask)
        masks = np.where(own > 0, CAUSAL, FULL)
    else:
        last = rows_before(kv_documents.offsets[doc + 1])
        masks = np.full(len(doc), FULL)

    seen = np.flatnonzero(last > first)
    q_row, first, last, doc = (np.cumsum(q_len) - q_len)[seen], first[seen], last[seen], doc[seen]
    tiles = np.zeros(len(seen), TILE)
    tiles["q_row"], tiles["q_rows"] = q_row, q_len[seen]
    tiles["k_row"], tiles["k_rows"] = first, last - first
    tiles["mask"], tiles["doc"] = masks[seen], doc
    tiles["q_pos"] = q_start[seen] - documents.offsets[doc]
    at = np.searchsorted(k_row, first, "right") - 1  # the span with the tile's first key
    tiles["k_pos"] = k_start[at] + first - k_row[at] - kv_documents.offsets[doc]
    return _joined(tiles)


def _joined(tiles: np.ndarray) -> np.ndarray:
    """A tile continues the one before it when its rows follow and it sees the same keys (full) or, for a causal one,
    just its own keys more. (A causal tile that follows a full one is left alone: no kernel has that shape.)"""
    if len(tiles) < 2:
        return tiles
    before, after = tiles[:-1], tiles[1:]
    growth = np.where(after["mask"] == CAUSAL, after["q_rows"], 0)
    follows = (
        (after["doc"] == before["doc"])
        & (after["q_row"] == before["q_row"] + before["q_rows"])
        & (after["mask"] == before["mask"])
        & (after["k_rows"] == before["k_rows"] + growth)
    )
    first = np.flatnonzero(np.append(True, ~follows))
    out = tiles[first]
    out["q_rows"] = np.add.reduceat(tiles["q_rows"], first)
    out["k_rows"] = tiles["k_rows"][np.append(first[1:], len(tiles)) - 1]
    return out


def _by_position(
    q_spans: np.ndarray,
    k_spans: np.ndarray,
    documents: Documents,
    kv_documents: Documents,
    attention: AttentionConfig,
) -> np.ndarray:
    """One tile for every pair of runs, a span of queries and a span of keys that follow each other, that see each
    other; trimmed to the rows that do."""
    left, right = attention.reach
    q_len, k_len = q_spans["stop"] - q_spans["start"], k_spans["stop"] - k_spans["start"]
    q_row, k_row = np.cumsum(q_len) - q_len, np.cumsum(k_len) - k_len
    runs = np.flatnonzero(
        np.append(True, (k_spans["start"][1:] != k_spans["stop"][:-1]) | (k_spans["doc"][1:] != k_spans["doc"][:-1]))
    )
    k_first = k_spans["start"][runs]  # tokens and rows of each run of keys
    k_last = k_spans["stop"][np.append(runs[1:], len(k_spans)) - 1]
    k_row = k_row[runs]

    offset, k_offset = documents.offsets[q_spans["doc"]], kv_documents.offsets[q_spans["doc"]]
    a, b = q_spans["start"] - offset, q_spans["stop"] - offset  # positions of the queries
    sees_from = k_offset + np.maximum(a - left, 0)
    sees_to = k_offset + np.minimum(b + right, kv_documents.lengths[q_spans["doc"]])
    lo = np.searchsorted(k_last, sees_from, "right")
    count = np.maximum(np.searchsorted(k_first, sees_to, "left") - lo, 0)
    pair = np.repeat(np.arange(len(q_spans)), count)
    run = expand(lo, count)
    a, b, offset = a[pair], b[pair], k_offset[pair]
    c, d = k_first[run] - offset, k_last[run] - offset  # positions of the keys
    k_at, q_at = k_row[run], q_row[pair]

    c2, d2 = np.maximum(c, a - left), np.minimum(d, b + right)
    a2, b2 = np.maximum(a, c - right), np.minimum(b, d + left)
    tiles = np.zeros(len(pair), TILE)
    tiles["doc"], tiles["q_pos"], tiles["k_pos"] = q_spans["doc"][pair], a2, c2
    tiles["q_row"], tiles["q_rows"] = q_at + a2 - a, b2 - a2
    tiles["k_row"], tiles["k_rows"] = k_at + c2 - c, d2 - c2
    tiles = tiles[(b2 > a2) & (d2 > c2)]
    return _classified(tiles, left, right)


def _classified(tiles: np.ndarray, left: int, right: int) -> np.ndarray:
    """Masks of trimmed tiles. A lower triangle whose last keys come before its last queries is cut into a triangle and
    what sees all."""
    first_q, last_q = tiles["q_pos"], tiles["q_pos"] + tiles["q_rows"] - 1
    first_k, last_k = tiles["k_pos"], tiles["k_pos"] + tiles["k_rows"] - 1
    cut_left, cut_right = first_k < last_q - left, last_k > first_q + right
    tiles["mask"] = np.where(cut_left | cut_right, BAND, FULL)
    causal = cut_right & ~cut_left & (right == 0)
    tiles["mask"][causal] = CAUSAL
    over = causal & (last_q > last_k)
    if not over.any():
        return tiles
    upper, lower = tiles[over].copy(), tiles[over].copy()
    rows = last_k[over] - first_q[over] + 1
    upper["q_rows"] = rows
    lower["q_row"], lower["q_pos"] = lower["q_row"] + rows, lower["q_pos"] + rows
    lower["q_rows"], lower["mask"] = lower["q_rows"] - rows, FULL
    tiles = np.concatenate([tiles[~over], upper, lower])
    return tiles[np.lexsort((tiles["k_row"], tiles["q_row"]))]


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


def pairs(tiles: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Visible (query, key) pairs of each tile, int64."""
    q, k = tiles["q_rows"], tiles["k_rows"]
    out = np.where(tiles["mask"] == CAUSAL, q * (k - q) + q * (q + 1) // 2, q * k)
    band = np.flatnonzero(tiles["mask"] == BAND)
    if len(band):
        first, last = visible_keys(tiles[band], attention)
        of = np.repeat(np.arange(len(band)), tiles["q_rows"][band])
        out[band] = np.bincount(of, weights=last - first, minlength=len(band)).astype(np.int64)
    return out


def visible_keys(tiles: np.ndarray, attention: AttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """First and last-plus-one key row, counted in its tile, that each q row of each BAND tile sees; the q rows of all
    tiles one after the other."""
    left, right = attention.reach
    n = tiles["q_rows"]
    position = expand(tiles["q_pos"], n) - np.repeat(tiles["k_pos"], n)
    rows = np.repeat(tiles["k_rows"], n)
    return np.clip(position - left, 0, rows), np.clip(position + right + 1, 0, rows)
