"""Tiles: the rows of a slot that a rank's queries see, in as few tiles as the mask allows and without empty ones."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Documents, ragged_arange
from mindspeed_cp.plan.problem import AttentionConfig
from mindspeed_cp.plan.records import BAND, CAUSAL, FULL, TILE


def tiles_between(
    q_spans: np.ndarray,
    k_spans: np.ndarray,
    documents: Documents,
    attention: AttentionConfig,
    kv_documents: Documents | None = None,
) -> np.ndarray:
    r"""Derive the tiles of a rank's queries against the keys in one slot.

    Both lists of spans ascend in token order, so each query sees one run of rows of the slot. A zig-zag rank has two
    chunks of a document, lo and hi; neighbouring chunks whose tiles form one rectangle are joined into one tile::

        against itself                 against an earlier rank        against a later rank
               lo  hi                        lo' hi'                        lo' hi'
          lo   \                        lo   #   .                     lo   .   .
          hi   #   \                    hi   #   .                     hi   #   #
          one causal square             one full tile                  one full tile

    Windows, ALiBi and dropout need positions: each of their tiles is one run of positions against another.

    In a tree, queries see all keys of their document's ancestors. Neighbouring documents that continue the same one
    share a full tile.

    Args:
        q_spans: queries of the rank in row order, records of dtype TOKEN_SPAN.
        k_spans: keys of the slot in row order, records of dtype TOKEN_SPAN.
        documents: documents of the batch.
        attention: mask and window.
        kv_documents: lengths of the keys if they differ from the queries; full masks only.

    Returns:
        Records of dtype TILE in the order of q rows; `step` and `slot` are zero.
    """
    if not len(q_spans) or not len(k_spans):
        return np.empty(0, TILE)
    if attention.needs_positions:
        return _tiles_by_position(q_spans, k_spans, documents, kv_documents or documents, attention)
    q_len = q_spans["stop"] - q_spans["start"]
    q_row = np.cumsum(q_len) - q_len
    own = _tiles_by_rows(q_spans, q_row, q_spans["doc"], k_spans, documents, kv_documents or documents, attention.mask)
    if documents.trees is None:
        return own
    span, seen = documents.seen_documents(np.ascontiguousarray(q_spans["doc"]))
    above = seen != q_spans["doc"][span]
    span, seen = span[above], seen[above]
    order = np.lexsort((span, documents.trees.depths[seen]))  # spans with the same ancestor side by side
    span, seen = span[order], seen[order]
    of_ancestors = _tiles_by_rows(q_spans[span], q_row[span], seen, k_spans, documents, documents, "full")
    tiles = np.concatenate([own, of_ancestors])
    return tiles[np.lexsort((tiles["k_row"], tiles["q_row"]))]


def _tiles_by_rows(
    q_spans: np.ndarray,
    q_row: np.ndarray,
    k_doc: np.ndarray,
    k_spans: np.ndarray,
    documents: Documents,
    kv_documents: Documents,
    mask: str,
) -> np.ndarray:
    """Derive one tile for each span of queries from row numbers, and join tiles where possible.

    Args:
        q_spans: queries, records of dtype TOKEN_SPAN.
        q_row: first row of each span, int64 [spans].
        k_doc: document whose keys each span sees, int64 [spans]; the spans' own under a causal mask.
        k_spans: keys of the slot, records of dtype TOKEN_SPAN.
        documents, kv_documents: documents by lengths of queries and of keys.
        mask: "causal" or "full".
    """
    k_start, k_stop = (np.ascontiguousarray(k_spans[name]) for name in ("start", "stop"))
    q_start, q_stop, doc = (np.ascontiguousarray(q_spans[name]) for name in ("start", "stop", "doc"))
    k_len, q_len = k_stop - k_start, q_stop - q_start
    k_row = np.cumsum(k_len) - k_len

    def rows_before(token: np.ndarray) -> np.ndarray:
        """Count the rows of the slot with smaller token numbers."""
        span = np.searchsorted(k_start, token, "right") - 1
        inside = np.minimum(token - k_start[span], k_len[span])
        return np.where(span >= 0, k_row[span] + inside, 0)

    first = rows_before(kv_documents.offsets[k_doc])
    if mask == "causal":
        last = rows_before(q_stop)
        in_slot = last - rows_before(q_start)
        if ((in_slot != 0) & (in_slot != q_len)).any():  # spans partly in the slot; the cut leaves none
            cut, row = _cut_at_kv_borders(q_spans, q_row, k_spans)
            return _tiles_by_rows(cut, row, cut["doc"], k_spans, documents, kv_documents, mask)
        masks = np.where(in_slot > 0, CAUSAL, FULL)
    else:
        last = rows_before(kv_documents.offsets[k_doc + 1])
        masks = np.full(len(doc), FULL)

    seen = np.flatnonzero(last > first)
    first, last, doc, k_doc = first[seen], last[seen], doc[seen], k_doc[seen]
    tiles = np.zeros(len(seen), TILE)
    tiles["q_row"], tiles["q_rows"] = q_row[seen], q_len[seen]
    tiles["k_row"], tiles["k_rows"] = first, last - first
    tiles["mask"], tiles["doc"], tiles["k_doc"] = masks[seen], doc, k_doc
    tiles["q_pos"] = q_start[seen] - _zero_tokens(documents, doc)
    span = np.searchsorted(k_row, first, "right") - 1  # the span that holds the first key of the tile
    tiles["k_pos"] = k_start[span] + first - k_row[span] - _zero_tokens(kv_documents, k_doc)
    return _join_tiles(tiles)


def _zero_tokens(documents: Documents, doc: np.ndarray) -> np.ndarray:
    """Return the number that the token at position 0 would have if a document began there: token - position."""
    return documents.offsets[doc] - documents.first_positions[doc]


def _join_tiles(tiles: np.ndarray) -> np.ndarray:
    """Join each tile to the one before it if its q rows follow and the union is one tile.

    A full tile must see the same keys as the one before, a causal tile these keys and as many more as it has q rows. A
    causal tile after a full one stays separate: no kernel has that shape.
    """
    if len(tiles) < 2:
        return tiles
    before, after = tiles[:-1], tiles[1:]
    growth = np.where(after["mask"] == CAUSAL, after["q_rows"], 0)
    follows = (
        (after["k_doc"] == before["k_doc"])
        & (after["q_row"] == before["q_row"] + before["q_rows"])
        & (after["mask"] == before["mask"])
        & (after["k_rows"] == before["k_rows"] + growth)
    )
    first = np.flatnonzero(np.append(True, ~follows))
    out = tiles[first]
    out["q_rows"] = np.add.reduceat(tiles["q_rows"], first)
    out["k_rows"] = tiles["k_rows"][np.append(first[1:], len(tiles)) - 1]
    return out


def _tiles_by_position(
    q_spans: np.ndarray,
    k_spans: np.ndarray,
    documents: Documents,
    kv_documents: Documents,
    attention: AttentionConfig,
) -> np.ndarray:
    """Derive one tile for each pair of a span of queries and a run of keys that see each other, trimmed to the rows
    that do."""
    left, right = attention.reach
    q_len, k_len = q_spans["stop"] - q_spans["start"], k_spans["stop"] - k_spans["start"]
    q_row, k_row = np.cumsum(q_len) - q_len, np.cumsum(k_len) - k_len
    new_run = (k_spans["start"][1:] != k_spans["stop"][:-1]) | (k_spans["doc"][1:] != k_spans["doc"][:-1])
    runs = np.flatnonzero(np.append(True, new_run))
    run_start = k_spans["start"][runs]  # tokens of each run of keys
    run_stop = k_spans["stop"][np.append(runs[1:], len(k_spans)) - 1]

    span, k_doc = documents.seen_documents(np.ascontiguousarray(q_spans["doc"]))
    doc = q_spans["doc"][span]
    q_zero, k_zero = _zero_tokens(documents, doc), _zero_tokens(kv_documents, k_doc)
    q_first, q_last = q_spans["start"][span] - q_zero, q_spans["stop"][span] - q_zero  # positions
    sees_from = np.maximum(k_zero + q_first - left, kv_documents.offsets[k_doc])
    sees_to = np.minimum(k_zero + q_last + right, kv_documents.offsets[k_doc + 1])
    run_begin = np.searchsorted(run_stop, sees_from, "right")
    count = np.maximum(np.searchsorted(run_start, sees_to, "left") - run_begin, 0)
    pair = np.repeat(np.arange(len(span)), count)  # the queries with the keys that they see, and the run of each tile
    run = ragged_arange(run_begin, count)
    q_first, q_last, span = q_first[pair], q_last[pair], span[pair]
    k_first, k_last = run_start[run] - k_zero[pair], run_stop[run] - k_zero[pair]

    k_low, k_high = np.maximum(k_first, q_first - left), np.minimum(k_last, q_last + right)  # trimmed
    q_low, q_high = np.maximum(q_first, k_first - right), np.minimum(q_last, k_last + left)
    tiles = np.zeros(len(span), TILE)
    tiles["doc"], tiles["k_doc"], tiles["q_pos"], tiles["k_pos"] = doc[pair], k_doc[pair], q_low, k_low
    tiles["q_row"], tiles["q_rows"] = q_row[span] + q_low - q_first, q_high - q_low
    tiles["k_row"], tiles["k_rows"] = k_row[runs][run] + k_low - k_first, k_high - k_low
    return _with_masks(tiles[(q_high > q_low) & (k_high > k_low)], left, right)


def _with_masks(tiles: np.ndarray, left: int, right: int) -> np.ndarray:
    """Set the masks of trimmed tiles; a causal tile whose last key comes before its last query is cut into a causal
    tile and a full one."""
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


def _cut_at_kv_borders(q_spans: np.ndarray, q_row: np.ndarray, k_spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut spans of queries where a span of keys begins or ends, so that each is either entirely in the slot or not;
    return them and the first row of each."""
    edges = np.unique(np.concatenate([k_spans["start"], k_spans["stop"], q_spans["start"], q_spans["stop"]]))
    first_edge = np.searchsorted(edges, q_spans["start"])
    count = np.searchsorted(edges, q_spans["stop"]) - first_edge
    source = np.repeat(np.arange(len(q_spans)), count)
    out = q_spans[source]
    edge = ragged_arange(first_edge, count)
    out["start"], out["stop"] = edges[edge], edges[edge + 1]
    return out, q_row[source] + out["start"] - q_spans["start"][source]


def count_pairs(tiles: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Count the visible (query, key) pairs of each tile, int64 [tiles]."""
    q, k = tiles["q_rows"], tiles["k_rows"]
    pairs = np.where(tiles["mask"] == CAUSAL, q * (k - q) + q * (q + 1) // 2, q * k)
    band = np.flatnonzero(tiles["mask"] == BAND)
    if len(band):
        first, last = visible_keys(tiles[band], attention)
        tile = np.repeat(np.arange(len(band)), tiles["q_rows"][band])
        pairs[band] = np.bincount(tile, weights=last - first, minlength=len(band)).astype(np.int64)
    return pairs


def visible_keys(tiles: np.ndarray, attention: AttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last-plus-one key row, relative to the tile, that each q row of BAND tiles sees; int64 [q
    rows of all tiles] each."""
    left, right = attention.reach
    q_rows = tiles["q_rows"]
    position = ragged_arange(tiles["q_pos"], q_rows) - np.repeat(tiles["k_pos"], q_rows)
    rows = np.repeat(tiles["k_rows"], q_rows)
    return np.clip(position - left, 0, rows), np.clip(position + right + 1, 0, rows)
