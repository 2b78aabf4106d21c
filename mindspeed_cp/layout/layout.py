"""Layout: which rank holds which tokens and heads, how tensors are sharded accordingly, and the builders of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout.documents import Documents
from mindspeed_cp.layout.runs import ragged_arange
from mindspeed_cp.schema.numbers import check_count, check_type, is_int

#: Records of :class:`TokenSpan`.
TOKEN_SPAN = np.dtype([(name, np.int64) for name in ("rank", "doc", "start", "stop")])


class TokenSpan(NamedTuple):
    """Run of tokens start .. stop-1 of one document, held by one rank; tokens are numbered over the whole batch."""

    rank: int
    doc: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Assignment of tokens and heads to ranks: for each rank, token spans in ascending order and one range of heads.

    :meth:`check` and the tests prove these laws:

    * every (token, head) is on exactly one rank; only kv heads may be on several;
    * the spans of a rank ascend, so the rows of one document on a rank are one run in which positions increase;
    * ``unshard([shard(x, r) for r in range(ranks)]) == x``.

    Attributes:
        documents: documents of the batch.
        ranks: number of context-parallel ranks.
        spans: records of dtype TOKEN_SPAN sorted by (rank, start), without empty spans.
        heads: int64 [ranks, 2], first and last-plus-one head of each rank; None: every rank has all heads.
    """

    documents: Documents
    ranks: int
    spans: np.ndarray
    heads: np.ndarray | None = None

    @cached_property
    def span_offsets(self) -> np.ndarray:
        """Offsets of the ranks in `spans`, int64 [ranks + 1]: rank r has spans[span_offsets[r] : span_offsets[r +
        1]]."""
        return np.searchsorted(self.spans["rank"], np.arange(self.ranks + 1))

    def rank_spans(self, rank: int) -> np.ndarray:
        """Return the spans of one rank, records of dtype TOKEN_SPAN. Raises ConfigError for an unknown rank."""
        self._check_rank(rank)
        return self.spans[self.span_offsets[rank] : self.span_offsets[rank + 1]]

    @cached_property
    def token_counts(self) -> np.ndarray:
        """Number of rows of each rank, int64 [ranks]."""
        ends = np.concatenate([[0], np.cumsum(self.spans["stop"] - self.spans["start"])])
        return ends[self.span_offsets[1:]] - ends[self.span_offsets[:-1]]

    @cached_property
    def span_first_rows(self) -> np.ndarray:
        """First local row of each span, int64 [spans]."""
        ends = np.concatenate([[0], np.cumsum(self.spans["stop"] - self.spans["start"])])
        return ends[:-1] - np.repeat(ends[self.span_offsets[:-1]], np.diff(self.span_offsets))

    def tokens(self, rank: int) -> np.ndarray:
        """Return the token number of each local row, int64 [t], ascending."""
        spans = self.rank_spans(rank)
        return ragged_arange(spans["start"], spans["stop"] - spans["start"])

    def positions(self, rank: int) -> np.ndarray:
        """Return the position of each local row in its document, or on its path from the root of a tree, int64 [t]."""
        spans, documents = self.rank_spans(rank), self.documents
        first = spans["start"] - documents.offsets[spans["doc"]] + documents.first_positions[spans["doc"]]
        return ragged_arange(first, spans["stop"] - spans["start"])

    def head_range(self, rank: int, heads: int) -> tuple[int, int]:
        """Return the first and last-plus-one head of a rank, given the total number of heads."""
        return (0, heads) if self.heads is None else (int(self.heads[rank, 0]), int(self.heads[rank, 1]))

    def head_bounds(self, heads: int) -> np.ndarray:
        """Return `head_range` of all ranks, int64 [ranks, 2]."""
        return np.tile([0, heads], (self.ranks, 1)) if self.heads is None else self.heads

    def head_counts(self, heads: int) -> np.ndarray:
        """Return the number of heads of each rank, int64 [ranks]; `heads` is the total number."""
        return np.full(self.ranks, heads) if self.heads is None else self.heads[:, 1] - self.heads[:, 0]

    def with_heads(self, heads: np.ndarray) -> Layout:
        """Return a layout of the same tokens with one range of heads for each rank, [ranks, 2]."""
        return replace(self, heads=np.asarray(heads, np.int64).reshape(self.ranks, 2))

    def same_as(self, other: Layout) -> bool:
        """Return True if both layouts assign the same rows and heads to every rank."""
        if self is other:
            return True
        if self.ranks != other.ranks or (self.heads is None) != (other.heads is None):
            return False
        same_heads = self.heads is None or np.array_equal(self.heads, other.heads)  # type: ignore[arg-type]
        return same_heads and np.array_equal(self.spans, other.spans)

    def shard(self, x: Any, rank: int) -> Any:
        """Return the rows (and heads) of x that a rank holds.

        Args:
            x: numpy array or torch tensor [tokens, ...]; [tokens, heads, ...] if the layout splits heads.
            rank: context-parallel rank.

        Returns:
            [t, ...], a copy; differentiable if x is a tensor that requires gradients.

        Raises:
            ConfigError: x is not an array or tensor, its number of rows is not the number of tokens, or the rank does
                not exist.
        """
        self._check_rank(rank)
        _check_array("shard: x", x, 1 if self.heads is None else 2)
        if len(x) != self.documents.tokens:
            raise ConfigError(f"shard: x has {len(x)} rows, but the documents have {self.documents.tokens} tokens")
        rows = x[self.tokens(rank)]
        return rows if self.heads is None else rows[:, self.heads[rank, 0] : self.heads[rank, 1]]

    def unshard(self, shards: Sequence[Any], heads: int | None = None) -> Any:
        """Assemble the shards of all ranks; the inverse of :meth:`shard`.

        Args:
            shards: one array or tensor [t, ...] for each rank, in rank order.
            heads: total number of heads; required only if the layout splits heads.

        Returns:
            [tokens, ...], array or tensor as the shards.

        Raises:
            ConfigError: a shard is missing or not an array or tensor, or its number of rows, other sizes or dtype do
                not match.
        """
        split_heads = self.heads is not None
        row_dims = 2 if split_heads else 1
        if len(shards) != self.ranks:
            raise ConfigError(f"unshard: {len(shards)} shards for {self.ranks} ranks")
        for rank, (shard, rows) in enumerate(zip(shards, self.token_counts, strict=True)):
            _check_array(f"unshard: the shard of rank {rank}", shard, row_dims)
            if len(shard) != rows:
                raise ConfigError(f"unshard: the shard of rank {rank} has {len(shard)} rows, the layout has {rows}")
            if shard.shape[row_dims:] != shards[0].shape[row_dims:] or shard.dtype != shards[0].dtype:
                raise ConfigError(
                    f"unshard: the shard of rank {rank} is {shard.dtype} {list(shard.shape)}, the shard of rank 0 is "
                    f"{shards[0].dtype} {list(shards[0].shape)}; valid: the same dtype and the same sizes except rows"
                )
        if split_heads and (not is_int(heads) or heads < int(self.heads.max(initial=0))):  # type: ignore[operator, union-attr]
            raise ConfigError(
                f"unshard: this layout splits heads, so the number of heads must be given: {heads!r}; valid: "
                f"{int(self.heads.max(initial=0))} or more"  # type: ignore[union-attr]
            )
        first = shards[0]
        shape = (self.documents.tokens, *(first.shape[1:] if self.heads is None else (heads, *first.shape[2:])))
        out = np.empty(shape, first.dtype) if isinstance(first, np.ndarray) else first.new_empty(shape)
        for rank, shard in enumerate(shards):
            if self.heads is None:
                out[self.tokens(rank)] = shard
            else:
                out[self.tokens(rank), self.heads[rank, 0] : self.heads[rank, 1]] = shard
        return out

    def check(self, heads: int | None = None) -> None:
        """Check the laws of a layout in which every (token, head) is on one rank.

        Args:
            heads: total number of heads, if the layout splits them.

        Raises:
            PlanError: a span is invalid or out of order, or a (token, head) is on no rank or on several.
        """
        self._check_spans()
        ranges = [(0, 1) if heads is None else self.head_range(rank, heads) for rank in range(self.ranks)]
        borders = np.unique([0, 1 if heads is None else heads, *np.ravel(ranges)])  # heads between two are held alike
        edges = np.unique(np.concatenate([[0, self.documents.tokens], self.spans["start"], self.spans["stop"]]))
        holders = np.zeros((len(edges), len(borders) - 1), np.int64)  # of the tokens from an edge to the next
        for rank, (first, last) in enumerate(ranges):
            if heads is not None and not 0 <= first <= last <= heads:
                raise PlanError(f"layout: rank {rank}: heads {first} to {last - 1} are not among the {heads} heads")
            spans, (low, high) = self.rank_spans(rank), np.searchsorted(borders, (first, last))
            np.add.at(holders[:, low:high], np.searchsorted(edges, spans["start"]), 1)
            np.add.at(holders[:, low:high], np.searchsorted(edges, spans["stop"]), -1)
        holders = np.cumsum(holders, 0, out=holders)[:-1]
        wrong = np.argwhere(holders != 1)
        if len(wrong):
            edge, column = map(int, wrong[0])
            token = int(edges[edge])
            raise PlanError(
                f"layout: token {token} (document {int(self.documents.document_of(np.asarray(token)))}), head "
                f"{borders[column]} is held by {int(holders[edge, column])} ranks, not by one"
            )

    def _check_spans(self) -> None:
        spans, offsets = self.spans, self.documents.offsets
        rank, doc = spans["rank"], spans["doc"]
        unknown = np.flatnonzero((rank < 0) | (rank >= self.ranks) | (doc < 0) | (doc >= len(self.documents)))
        if len(unknown):
            raise PlanError(f"layout: {_span(spans[unknown[0]])} names a rank or document that does not exist")
        outside = (
            (spans["start"] < offsets[doc]) | (spans["stop"] > offsets[doc + 1]) | (spans["stop"] <= spans["start"])
        )
        if outside.any():
            raise PlanError(f"layout: {_span(spans[np.argmax(outside)])} is empty or leaves its document")
        behind = (rank[1:] < rank[:-1]) | ((rank[1:] == rank[:-1]) & (spans["start"][1:] < spans["stop"][:-1]))
        if behind.any():
            span = _span(spans[1 + int(np.argmax(behind))])
            raise PlanError(f"layout: rank {span.rank}: {span} does not follow the span before it in token order")

    def _check_rank(self, rank: int) -> None:
        if not is_int(rank) or not 0 <= rank < self.ranks:
            raise ConfigError(f"rank {rank!r} does not exist: this layout has ranks 0 to {self.ranks - 1}")


def _span(record: np.ndarray) -> TokenSpan:
    return TokenSpan(*map(int, record))


def _check_array(name: str, x: object, dims: int) -> None:
    """Raise ConfigError unless x is a numpy array or torch tensor with at least `dims` dimensions."""
    shape = getattr(x, "shape", None)
    if not isinstance(shape, tuple) or not (isinstance(x, np.ndarray) or hasattr(x, "new_empty")):
        raise ConfigError(f"{name} is a {type(x).__name__}; valid: a numpy array or a torch tensor")
    if len(shape) < dims:
        axes = "[tokens, ...]" if dims == 1 else "[tokens, heads, ...], as this layout splits heads"
        raise ConfigError(f"{name} has shape {list(shape)}; valid: {axes}")


# Builders: zig-zag of documents or of the row, contiguous, weighted shares, and any given spans.


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
