"""Layouts by name: zig-zag and contiguous per document, and equal shares of the packed row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.documents import Documents
from mindspeed_cp.layout.layout import SPAN, Layout, is_whole
from mindspeed_cp.layout.runs import expand

Groups = Sequence[Sequence[int] | np.ndarray]


def zigzag(documents: Documents, ranks: int, groups: Groups | None = None) -> Layout:
    """Every document in 2G chunks, G the ranks that share it; member i takes chunks i and 2G-1-i.

    Under a causal mask each rank then does the same work, up to one token per chunk. One document, G = 4::

        chunk   0  1  2  3  4  5  6  7
        rank    0  1  2  3  3  2  1  0

    Chunk c of a document of L tokens is floor(c*L/2G) .. floor((c+1)*L/2G): any length works and nothing is padded; a
    document shorter than 2G leaves some chunks empty.

    Args:
        documents: the batch.
        ranks: context-parallel ranks.
        groups: for each document the distinct ranks that share it, in zig-zag order (one rank: it stays whole there);
            default: all ranks.

    Raises:
        ConfigError: `ranks` is not positive, or a group is empty, repeats a rank or names one that does not exist.
    """
    _check_ranks(ranks)
    if groups is None:
        return _on_all_ranks(documents, ranks, 2 * ranks, lambda r: (r, 2 * ranks - 1 - r))
    doc, member, size, ranks_of = _members(documents, ranks, groups)
    chunk = np.stack([member, 2 * size - 1 - member])
    return _from_chunks(documents, ranks, ranks_of, doc, chunk, 2 * size)


def contiguous(documents: Documents, ranks: int, groups: Groups | None = None) -> Layout:
    """Every document in G equal runs, G the ranks that share it; member i takes run i, floor(i*L/G) ..
    floor((i+1)*L/G).

    Balanced for full masks; under a causal mask the last rank does about twice the mean. Arguments and errors as for
    :func:`zigzag`.
    """
    if groups is None:
        return _on_all_ranks(documents, ranks, ranks, lambda r: (r,))
    doc, member, size, ranks_of = _members(documents, ranks, groups)
    return _from_chunks(documents, ranks, ranks_of, doc, member[None], size)


def weighted(
    documents: Documents,
    ranks: int,
    doc: np.ndarray,
    rank: np.ndarray,
    share: np.ndarray,
    mirrored: bool = True,
) -> Layout:
    """Every document over the ranks given, each of which takes a share of it.

    Mirrored, as for zig-zag: a rank with the share f takes f/2 of the document in its first half and the mirror image
    in its second, so that under a causal mask it does the share f of the work, whatever the shares of the others. Else
    one run each, in the order of members. Borders are rounded down to whole tokens.

    Args:
        documents: the batch.
        ranks: context-parallel ranks.
        doc, rank: the members, sorted by document: int64 [members]; every document that is not empty has one or more,
            all of other ranks.
        share: fp64 [members], above 0; the shares of a document are normalised to add up to 1.
        mirrored: False for masks under which all tokens have the same work.
    """
    size = np.bincount(doc, minlength=len(documents))
    first = np.cumsum(size) - size
    total = np.add.reduceat(share, first[size > 0]) if len(doc) else np.zeros(0)
    whole = np.zeros(len(documents))
    whole[size > 0] = total
    before = np.cumsum(share) - share
    before -= before[np.minimum(first, max(len(doc) - 1, 0))][doc] if len(doc) else 0.0
    last = np.zeros(len(doc), bool)
    last[(first + size - 1)[size > 0]] = True
    length, offset = documents.lengths[doc], documents.offsets[doc]
    half = length // 2 if mirrored else length
    low = np.floor(np.clip(before / whole[doc], 0, 1) * half).astype(np.int64)
    high = np.empty_like(low)
    high[:-1] = low[1:]
    high[last] = half[last]
    spans = np.empty((2 if mirrored else 1, len(doc)), SPAN)
    spans["rank"], spans["doc"] = rank, doc
    spans["start"][0], spans["stop"][0] = offset + low, offset + high
    if mirrored:
        spans["start"][1] = offset + np.where(last, half, length - high)
        spans["stop"][1] = offset + length - low
    return from_spans(documents, ranks, spans.reshape(-1))


def equal_tokens(documents: Documents, ranks: int) -> Layout:
    """The packed row cut into equal shares (to one token), documents or not: what linear layers like."""
    _check_ranks(ranks)
    cuts = np.arange(ranks + 1) * documents.tokens // ranks
    edges = np.unique(np.concatenate([cuts, documents.offsets]))
    start, stop = edges[:-1], edges[1:]
    spans = np.empty(len(start), SPAN)
    spans["rank"] = np.searchsorted(cuts, start, "right") - 1
    spans["doc"], spans["start"], spans["stop"] = documents.document_of(start), start, stop
    return Layout(documents, ranks, spans)


def from_spans(documents: Documents, ranks: int, spans: np.ndarray) -> Layout:
    """A layout of any spans (records of dtype SPAN): sorted, without empty ones, chunks that touch joined.

    The result is not checked here: call :meth:`Layout.check` on layouts of your own.
    """
    spans = spans[spans["stop"] > spans["start"]]
    return Layout(documents, ranks, _joined(spans[np.lexsort((spans["start"], spans["rank"]))]))


def _joined(spans: np.ndarray) -> np.ndarray:
    """Sorted spans of one rank and document that touch become one, as on the last rank of a zig-zag."""
    joined = np.zeros(len(spans), bool)
    joined[1:] = (
        (spans["start"][1:] == spans["stop"][:-1])
        & (spans["rank"][1:] == spans["rank"][:-1])
        & (spans["doc"][1:] == spans["doc"][:-1])
    )
    if not joined.any():
        return spans
    first = np.flatnonzero(~joined)
    out = spans[first]
    out["stop"] = spans["stop"][np.append(first[1:], len(spans)) - 1]
    return out


def _on_all_ranks(documents: Documents, ranks: int, chunks: int, chunks_of) -> Layout:  # type: ignore[no-untyped-def]
    """All documents on all ranks: chunk borders are columns of one table, already in the order of (rank, token)."""
    _check_ranks(ranks)
    lengths, offsets = documents.lengths, documents.offsets[:-1]
    taken = np.array([sorted(chunks_of(r)) for r in range(ranks)])  # [ranks, chunks per rank]
    per = taken.shape[1]
    spans = np.empty((ranks, len(lengths), per), SPAN)
    spans["rank"] = np.arange(ranks)[:, None, None]
    spans["doc"] = np.arange(len(lengths))[:, None]
    spans["start"] = offsets[:, None] + taken[:, None, :] * lengths[:, None] // chunks
    spans["stop"] = offsets[:, None] + (taken[:, None, :] + 1) * lengths[:, None] // chunks
    flat = spans.reshape(-1)
    return Layout(documents, ranks, _joined(flat[flat["stop"] > flat["start"]]))


def _members(documents: Documents, ranks: int, groups: Groups) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each (document, member): document, number of the member in its group, size of the group, rank."""
    _check_ranks(ranks)
    if len(groups) != len(documents):
        raise ConfigError(f"groups: {len(groups)} groups for {len(documents)} documents; give one for each")
    size = np.array([len(g) for g in groups], np.int64)
    rank_of = np.concatenate([np.asarray(g, np.int64) for g in groups]) if len(groups) else np.zeros(0, np.int64)
    doc = np.repeat(np.arange(len(size)), size)
    twice = np.zeros(0, np.int64)
    if len(rank_of):
        key = np.sort(doc * ranks + rank_of)
        twice = np.flatnonzero(key[1:] == key[:-1])
    bad = np.flatnonzero((rank_of < 0) | (rank_of >= ranks))
    if (size == 0).any() or len(bad) or len(twice):
        at = (
            int(np.argmax(size == 0)) if (size == 0).any() else int(doc[bad[0]] if len(bad) else key[twice[0]] // ranks)
        )
        raise ConfigError(
            f"groups: document {at} has group {[int(r) for r in groups[at]]}; "
            f"a group needs one or more distinct ranks out of 0 to {ranks - 1}"
        )
    member = expand(np.zeros_like(size), size)
    return doc, member, size[doc], rank_of


def _from_chunks(
    documents: Documents, ranks: int, rank_of: np.ndarray, doc: np.ndarray, chunk: np.ndarray, chunks: np.ndarray
) -> Layout:
    length, offset = documents.lengths[doc], documents.offsets[doc]
    spans = np.empty(chunk.shape, SPAN)
    spans["rank"], spans["doc"] = rank_of, doc
    spans["start"] = offset + chunk * length // chunks
    spans["stop"] = offset + (chunk + 1) * length // chunks
    return from_spans(documents, ranks, spans.reshape(-1))


def _check_ranks(ranks: int) -> None:
    if not is_whole(ranks) or not 1 <= ranks < 2**31:
        raise ConfigError(f"ranks is {ranks!r}; a layout needs 1 or more")
