"""Tiles: the rows of a slot that a rank's queries see, in as few tiles as the mask allows and without empty ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mindspeed_cp.layout import Documents, intersect_runs, ragged_arange, union_of_runs
from mindspeed_cp.layout.runs import concatenate_records
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
    share a full tile. Queries in a block see all keys of it: full tiles, which the spans are cut for.

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
    q_len = q_spans["stop"] - q_spans["start"]
    queries = SpanRows(q_spans, np.cumsum(q_len) - q_len, np.full(len(q_spans), -1))
    keys = kv_documents or documents
    if documents.blocks is not None:
        spans, source, block = documents.blocks.cut(q_spans)
        queries = SpanRows(spans, queries.row[source] + spans["start"] - q_spans["start"][source], block)
    if attention.needs_positions:
        tiles = _tiles_by_position(queries, k_spans, documents, keys, attention)
        in_block = queries.select(queries.block >= 0)
        tables = [tiles, _tiles_inside_blocks(in_block, k_spans, documents)] if len(in_block.spans) else [tiles]
    else:
        tables = _tables_by_rows(queries, k_spans, documents, keys, attention.mask)
    if len(tables) == 1:
        return tables[0]
    tiles = concatenate_records(tables)
    return tiles[np.lexsort((tiles["k_row"], tiles["q_row"]))]


@dataclass(frozen=True, eq=False)
class SpanRows:
    """Spans of queries, where they are among the rank's rows, and which are in blocks.

    Attributes:
        spans: records of dtype TOKEN_SPAN.
        row: first row of each span, int64 [spans].
        block: block of each span, or -1, int64 [spans].
    """

    spans: np.ndarray
    row: np.ndarray
    block: np.ndarray

    def select(self, index: np.ndarray) -> SpanRows:
        """Return some spans, by a mask or by indices."""
        return SpanRows(self.spans[index], self.row[index], self.block[index])


def _tables_by_rows(
    queries: SpanRows, k_spans: np.ndarray, documents: Documents, kv_documents: Documents, mask: str
) -> list[np.ndarray]:
    """Derive tiles from row numbers: of documents with themselves, of queries in blocks with all keys up to the end of
    their block, and of documents with their ancestors."""
    is_text = queries.block < 0
    text = queries if is_text.all() else queries.select(is_text)
    tables = [_tiles_by_rows(text, text.spans["doc"], None, k_spans, documents, kv_documents, mask)]
    if documents.blocks is not None and not is_text.all():
        inside = queries.select(~is_text)
        stop = documents.blocks.stop[inside.block]
        tables.append(_tiles_by_rows(inside, inside.spans["doc"], stop, k_spans, documents, documents, "full"))
    if documents.trees is not None:
        span, seen = documents.seen_documents(np.ascontiguousarray(queries.spans["doc"]))
        above = seen != queries.spans["doc"][span]
        span, seen = span[above], seen[above]
        order = np.lexsort((span, documents.trees.depths[seen]))  # spans with the same ancestor side by side
        of_spans = queries.select(span[order])
        tables.append(_tiles_by_rows(of_spans, seen[order], None, k_spans, documents, documents, "full"))
    return tables


def _tiles_by_rows(
    queries: SpanRows,
    k_doc: np.ndarray,
    k_stop: np.ndarray | None,
    k_spans: np.ndarray,
    documents: Documents,
    kv_documents: Documents,
    mask: str,
) -> np.ndarray:
    """Derive one tile for each span of queries from row numbers, and join tiles where possible.

    Args:
        queries: spans of queries.
        k_doc: document whose keys each span sees, int64 [spans]; the spans' own under a causal mask.
        k_stop: token before which it sees these, int64 [spans]; None: all, or as far as a causal mask lets it.
        k_spans: keys of the slot, records of dtype TOKEN_SPAN.
        documents, kv_documents: documents by lengths of queries and of keys.
        mask: "causal" or "full".
    """
    q_spans, q_row = queries.spans, queries.row
    k_start = np.ascontiguousarray(k_spans["start"])
    q_start, q_stop, doc = (np.ascontiguousarray(q_spans[name]) for name in ("start", "stop", "doc"))
    k_len, q_len = k_spans["stop"] - k_start, q_stop - q_start
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
            cut = _cut_at_kv_borders(queries, k_spans)
            return _tiles_by_rows(cut, cut.spans["doc"], None, k_spans, documents, kv_documents, mask)
        masks = np.where(in_slot > 0, CAUSAL, FULL)
    else:
        last = rows_before(kv_documents.offsets[k_doc + 1] if k_stop is None else k_stop)
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
    queries: SpanRows,
    k_spans: np.ndarray,
    documents: Documents,
    kv_documents: Documents,
    attention: AttentionConfig,
) -> np.ndarray:
    """Derive one tile for each pair of a span of queries and a run of keys that see each other, trimmed to the rows
    that do; for queries in a block, of the keys before the block."""
    left, right = attention.visible_range
    q_spans, q_row = queries.spans, queries.row
    run_row, run_start, run_stop = _key_runs(k_spans)

    span, k_doc = documents.seen_documents(np.ascontiguousarray(q_spans["doc"]))
    doc = q_spans["doc"][span]
    q_zero, k_zero = _zero_tokens(documents, doc), _zero_tokens(kv_documents, k_doc)
    q_first, q_last = q_spans["start"][span] - q_zero, q_spans["stop"][span] - q_zero  # positions
    sees_from = np.maximum(k_zero + q_first - left, kv_documents.offsets[k_doc])
    sees_to = np.minimum(k_zero + q_last + right, kv_documents.offsets[k_doc + 1])
    if documents.blocks is not None:
        is_own = (queries.block[span] >= 0) & (k_doc == doc)
        sees_to[is_own] = documents.blocks.start[queries.block[span[is_own]]]
    run_begin = np.searchsorted(run_stop, sees_from, "right")
    count = np.maximum(np.searchsorted(run_start, sees_to, "left") - run_begin, 0)
    pair = np.repeat(np.arange(len(span)), count)  # the queries with the keys that they see, and the run of each tile
    run = ragged_arange(run_begin, count)
    q_first, q_last, span = q_first[pair], q_last[pair], span[pair]
    k_first, k_last = run_start[run] - k_zero[pair], np.minimum(run_stop[run], sees_to[pair]) - k_zero[pair]

    k_low, k_high = np.maximum(k_first, q_first - left), np.minimum(k_last, q_last + right)  # trimmed
    q_low, q_high = np.maximum(q_first, k_first - right), np.minimum(q_last, k_last + left)
    tiles = np.zeros(len(span), TILE)
    tiles["doc"], tiles["k_doc"], tiles["q_pos"], tiles["k_pos"] = doc[pair], k_doc[pair], q_low, k_low
    tiles["q_row"], tiles["q_rows"] = q_row[span] + q_low - q_first, q_high - q_low
    tiles["k_row"], tiles["k_rows"] = run_row[run] + k_low - k_first, k_high - k_low
    return _with_masks(tiles[(q_high > q_low) & (k_high > k_low)], left, right)


def _key_runs(k_spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return first row, first token and last-plus-one token of each run of consecutive keys of one document, int64
    [runs] each."""
    k_len = k_spans["stop"] - k_spans["start"]
    new_run = (k_spans["start"][1:] != k_spans["stop"][:-1]) | (k_spans["doc"][1:] != k_spans["doc"][:-1])
    runs = np.flatnonzero(np.append(True, new_run))
    row = np.cumsum(k_len) - k_len
    return row[runs], k_spans["start"][runs], k_spans["stop"][np.append(runs[1:], len(k_spans)) - 1]


def _tiles_inside_blocks(queries: SpanRows, k_spans: np.ndarray, documents: Documents) -> np.ndarray:
    """Derive a full tile for each pair of a span of queries in a block and a run of keys of that block."""
    assert documents.blocks is not None
    run_row, run_start, run_stop = _key_runs(k_spans)
    start, stop = documents.blocks.start[queries.block], documents.blocks.stop[queries.block]
    span, run, first, last = intersect_runs(start, stop, run_start, run_stop)
    doc = queries.spans["doc"][span]
    tiles = np.zeros(len(span), TILE)
    tiles["mask"], tiles["doc"], tiles["k_doc"] = FULL, doc, doc
    tiles["q_row"], tiles["q_rows"] = queries.row[span], (queries.spans["stop"] - queries.spans["start"])[span]
    tiles["k_row"], tiles["k_rows"] = run_row[run] + first - run_start[run], last - first
    zero = _zero_tokens(documents, doc)
    tiles["q_pos"], tiles["k_pos"] = queries.spans["start"][span] - zero, first - zero
    return tiles


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


def _cut_at_kv_borders(queries: SpanRows, k_spans: np.ndarray) -> SpanRows:
    """Cut spans of queries where a span of keys begins or ends, so that each is either entirely in the slot or not."""
    q_spans = queries.spans
    edges = np.unique(np.concatenate([k_spans["start"], k_spans["stop"], q_spans["start"], q_spans["stop"]]))
    first_edge = np.searchsorted(edges, q_spans["start"])
    count = np.searchsorted(edges, q_spans["stop"]) - first_edge
    source = np.repeat(np.arange(len(q_spans)), count)
    out = q_spans[source]
    edge = ragged_arange(first_edge, count)
    out["start"], out["stop"] = edges[edge], edges[edge + 1]
    return SpanRows(out, queries.row[source] + out["start"] - q_spans["start"][source], queries.block[source])


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
    left, right = attention.visible_range
    q_rows = tiles["q_rows"]
    position = ragged_arange(tiles["q_pos"], q_rows) - np.repeat(tiles["k_pos"], q_rows)
    rows = np.repeat(tiles["k_rows"], q_rows)
    return np.clip(position - left, 0, rows), np.clip(position + right + 1, 0, rows)


# Rows of slots that tiles read: where slots hold latents, these rows alone are expanded to keys and values.


#: Runs of rows, ascending and apart: first row and number of rows of each, int64 [runs] each.
Runs = tuple[np.ndarray, np.ndarray]


def number_keys_read(tiles: np.ndarray) -> tuple[np.ndarray, dict[tuple[int, int], Runs]]:
    """Number the keys of tiles among the rows that a step reads of a slot, instead of all rows of the slot.

    Args:
        tiles: records of dtype TILE of one rank, sorted by (step, slot).

    Returns:
        The tiles with new `k_row`, in their order; and the rows that are read, by (step, slot).
    """
    out, rows_read = tiles.copy(), {}
    if not len(tiles):
        return out, {}
    changes = (np.diff(tiles["step"]) != 0) | (np.diff(tiles["slot"]) != 0)
    borders = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(tiles)]]).tolist()
    for begin, end in pairwise(borders):
        group = tiles[begin:end]
        runs = union_of_runs(np.stack([group["k_row"], group["k_row"] + group["k_rows"]], 1))
        first, count = runs[:, 0], runs[:, 1] - runs[:, 0]
        run = np.searchsorted(first, group["k_row"], "right") - 1
        rows_before = np.cumsum(count) - count
        out["k_row"][begin:end] = group["k_row"] - first[run] + rows_before[run]
        rows_read[int(group["step"][0]), int(group["slot"][0])] = first, count
    return out, rows_read
