"""Builders of layouts: zig-zag of documents or of the row, contiguous, weighted shares, and any given spans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.documents import Documents
from mindspeed_cp.layout.layout import TOKEN_SPAN, Layout
from mindspeed_cp.layout.runs import ragged_arange
from mindspeed_cp.schema.numbers import check_count, check_type

#: For each document the ranks that share it.
DocRanks = Sequence[Sequence[int] | np.ndarray]


def zigzag(documents: Documents, ranks: int, doc_ranks: DocRanks | None = None) -> Layout:
    """Cut every document into 2G chunks, where G ranks share it; the i-th of these ranks takes chunks i and 2G-1-i.

    Under a causal mask all ranks then have the same work, up to one token per chunk. One document, G = 4::

        chunk   0  1  2  3  4  5  6  7
        rank    0  1  2  3  3  2  1  0

    Chunk c of a document of L tokens is floor(c*L/2G) .. floor((c+1)*L/2G), so any length works and nothing is padded;
    a document shorter than 2G tokens has empty chunks.

    Args:
        documents: documents of the batch.
        ranks: number of context-parallel ranks.
        doc_ranks: for each document the distinct ranks that share it, in zig-zag order (one rank: the whole document is
            there); default: all ranks.

    Raises:
        ConfigError: `ranks` is not positive, or the ranks of a document are none, repeated or out of range.
    """
    return _in_chunks(documents, ranks, doc_ranks, True)


def contiguous(documents: Documents, ranks: int, doc_ranks: DocRanks | None = None) -> Layout:
    """Cut every document into G equal runs, where G ranks share it; the i-th takes floor(i*L/G) .. floor((i+1)*L/G).

    Work is balanced for full masks; under a causal mask the last rank has about twice the mean. Arguments and errors as
    for :func:`zigzag`.
    """
    return _in_chunks(documents, ranks, doc_ranks, False)


def row_zigzag(documents: Documents, ranks: int) -> Layout:
    """Cut the whole packed row into 2G chunks, wherever documents end; rank i of G takes chunks i and 2G-1-i.

    Tokens are balanced, but work is not: a rank has the long documents that lie in its chunks. Two ranks, documents of
    5, 1 and 2 tokens::

        document  a a a a a b c c
        rank      0 0 1 1 1 1 0 0

    Chunk c of a row of T tokens is floor(c*T/2G) .. floor((c+1)*T/2G).

    Args:
        documents: documents of the batch.
        ranks: number of context-parallel ranks.

    Raises:
        ConfigError: `ranks` is not positive.
    """
    check_type("documents", documents, Documents)
    check_count("ranks", ranks, most=2**31 - 1)
    cuts = np.arange(2 * ranks + 1) * documents.tokens // (2 * ranks)
    edges = np.unique(np.concatenate([cuts, documents.offsets]))
    start, stop = edges[:-1], edges[1:]
    chunk = np.searchsorted(cuts, start, "right") - 1
    spans = np.empty(len(start), TOKEN_SPAN)
    spans["rank"], spans["doc"] = np.minimum(chunk, 2 * ranks - 1 - chunk), documents.document_of(start)
    spans["start"], spans["stop"] = start, stop
    return from_spans(documents, ranks, spans)


def weighted(
    documents: Documents,
    ranks: int,
    doc: np.ndarray,
    rank: np.ndarray,
    share: np.ndarray,
    mirrored: bool = True,
) -> Layout:
    """Cut every document into given shares.

    If mirrored, a rank with share f takes f/2 of the document in its first half and the mirror image in its second
    half. As for zig-zag, it then has the share f of the work under a causal mask, whatever the other shares are.
    Otherwise each rank takes one run. Borders are rounded down to whole tokens.

    Args:
        documents: documents of the batch.
        ranks: number of context-parallel ranks.
        doc, rank: one entry for each rank of each document, sorted by document, int64 [members]; every document that is
            not empty has one member or more, on distinct ranks.
        share: share of the document, above 0, fp64 [members]; shares of a document are normalized to a sum of 1.
        mirrored: False for masks under which all tokens have the same work.
    """
    size = np.bincount(doc, minlength=len(documents))
    first = np.cumsum(size) - size
    total = np.zeros(len(documents))
    if len(doc):
        total[size > 0] = np.add.reduceat(share, first[size > 0])
    before = np.cumsum(share) - share
    before -= before[np.minimum(first, max(len(doc) - 1, 0))][doc] if len(doc) else 0.0
    is_last = np.zeros(len(doc), bool)
    is_last[(first + size - 1)[size > 0]] = True
    length, offset = documents.lengths[doc], documents.offsets[doc]
    half = length // 2 if mirrored else length
    low = np.floor(np.clip(before / total[doc], 0, 1) * half).astype(np.int64)
    high = np.empty_like(low)
    high[:-1] = low[1:]
    high[is_last] = half[is_last]
    spans = np.empty((2 if mirrored else 1, len(doc)), TOKEN_SPAN)
    spans["rank"], spans["doc"] = rank, doc
    spans["start"][0], spans["stop"][0] = offset + low, offset + high
    if mirrored:
        spans["start"][1] = offset + np.where(is_last, half, length - high)
        spans["stop"][1] = offset + length - low
    return from_spans(documents, ranks, spans.reshape(-1))


def from_spans(documents: Documents, ranks: int, spans: np.ndarray) -> Layout:
    """Build a layout from any spans (records of dtype TOKEN_SPAN): sort them, drop empty ones, join those that touch.

    The result is not checked; call :meth:`Layout.check` if the spans come from outside.
    """
    spans = spans[spans["stop"] > spans["start"]]
    return Layout(documents, ranks, _join_touching(spans[np.lexsort((spans["start"], spans["rank"]))]))


def _join_touching(spans: np.ndarray) -> np.ndarray:
    """Join sorted spans of one rank and document that touch, as the two middle chunks of a zig-zag do."""
    continues = np.zeros(len(spans), bool)
    continues[1:] = (
        (spans["start"][1:] == spans["stop"][:-1])
        & (spans["rank"][1:] == spans["rank"][:-1])
        & (spans["doc"][1:] == spans["doc"][:-1])
    )
    if not continues.any():
        return spans
    first = np.flatnonzero(~continues)
    out = spans[first]
    out["stop"] = spans["stop"][np.append(first[1:], len(spans)) - 1]
    return out


def _in_chunks(documents: Documents, ranks: int, doc_ranks: DocRanks | None, mirrored: bool) -> Layout:
    """Cut documents into as many equal chunks as ranks share each, one for each rank; mirrored: into twice as many, for
    each rank one and its mirror image."""
    check_type("documents", documents, Documents)
    check_count("ranks", ranks, most=2**31 - 1)
    if doc_ranks is None:
        first = np.arange(ranks)
        return _on_all_ranks(documents, np.stack([first, 2 * ranks - 1 - first], 1) if mirrored else first[:, None])
    doc, member, size, rank = _members(documents, ranks, doc_ranks)
    chunk, chunks = (np.stack([member, 2 * size - 1 - member]), 2 * size) if mirrored else (member[None], size)
    length, offset = documents.lengths[doc], documents.offsets[doc]
    spans = np.empty(chunk.shape, TOKEN_SPAN)
    spans["rank"], spans["doc"] = rank, doc
    spans["start"] = offset + chunk * length // chunks
    spans["stop"] = offset + (chunk + 1) * length // chunks
    return from_spans(documents, ranks, spans.reshape(-1))


def _on_all_ranks(documents: Documents, chunks: np.ndarray) -> Layout:
    """Give all documents to all ranks; `chunks` has the ascending chunk numbers of each rank, [ranks, chunks each]."""
    ranks, per_rank = chunks.shape
    lengths, offsets = documents.lengths, documents.offsets[:-1]
    spans = np.empty((ranks, len(lengths), per_rank), TOKEN_SPAN)
    spans["rank"] = np.arange(ranks)[:, None, None]
    spans["doc"] = np.arange(len(lengths))[:, None]
    spans["start"] = offsets[:, None] + chunks[:, None, :] * lengths[:, None] // chunks.size
    spans["stop"] = offsets[:, None] + (chunks[:, None, :] + 1) * lengths[:, None] // chunks.size
    flat = spans.reshape(-1)
    return Layout(documents, ranks, _join_touching(flat[flat["stop"] > flat["start"]]))


def _members(
    documents: Documents, ranks: int, doc_ranks: DocRanks
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each (document, member): document, index of the member, number of members, rank."""
    if len(doc_ranks) != len(documents):
        raise ConfigError(f"doc_ranks: {len(doc_ranks)} entries for {len(documents)} documents; valid: one for each")
    size = np.array([len(members) for members in doc_ranks], np.int64)
    rank = np.concatenate([np.zeros(0, np.int64), *(np.asarray(members, np.int64) for members in doc_ranks)])
    doc = np.repeat(np.arange(len(size)), size)
    key = np.sort(doc * ranks + rank)
    repeated = np.flatnonzero(key[1:] == key[:-1])
    unknown = np.flatnonzero((rank < 0) | (rank >= ranks))
    if (size == 0).any() or len(unknown) or len(repeated):
        if (size == 0).any():
            wrong = int(np.argmax(size == 0))
        else:
            wrong = int(doc[unknown[0]] if len(unknown) else key[repeated[0]] // ranks)
        raise ConfigError(
            f"doc_ranks: document {wrong} has ranks {[int(r) for r in doc_ranks[wrong]]}; "
            f"valid: one or more distinct ranks from 0 to {ranks - 1}"
        )
    return doc, ragged_arange(np.zeros_like(size), size), size[doc], rank
