"""Who holds which tokens and which heads, and how a tensor is cut accordingly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout.documents import Documents
from mindspeed_cp.layout.runs import expand

SPAN = np.dtype([(name, np.int64) for name in ("rank", "doc", "start", "stop")])


class Span(NamedTuple):
    """Tokens start .. stop-1 (batch numbering) of one document, held by one rank."""

    rank: int
    doc: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Layout:
    """For every rank: spans of documents in ascending token order, and one range of heads.

    Laws, proved by :meth:`check` and by the tests:

    * every (token, head) is held exactly once; only kv heads may be held more often (`replicated`);
    * the spans of a rank ascend, so a rank's rows of one document are one run in which positions increase;
    * ``unshard([shard(x, r) for r in range(ranks)]) == x``.

    Attributes:
        documents: the batch.
        ranks: context-parallel ranks.
        spans: records of dtype SPAN sorted by (rank, start); never empty spans.
        heads: int64 [ranks, 2], first and last-plus-one head of each rank, or None for all heads on every rank.
    """

    documents: Documents
    ranks: int
    spans: np.ndarray
    heads: np.ndarray | None = None

    @cached_property
    def bounds(self) -> np.ndarray:
        """spans[bounds[r] : bounds[r + 1]] belong to rank r; int64 [ranks + 1]."""
        return np.searchsorted(self.spans["rank"], np.arange(self.ranks + 1))

    def of(self, rank: int) -> np.ndarray:
        """The rank's spans (records).  ConfigError if there is no such rank."""
        self._check_rank(rank)
        return self.spans[self.bounds[rank] : self.bounds[rank + 1]]

    def spans_of(self, rank: int) -> Iterator[Span]:
        """The rank's spans, one object each, for reading and printing."""
        return (Span(*map(int, s)) for s in self.of(rank))

    @cached_property
    def token_counts(self) -> np.ndarray:
        """Rows of each rank, int64 [ranks]."""
        ends = np.concatenate([[0], np.cumsum(self.spans["stop"] - self.spans["start"])])
        return ends[self.bounds[1:]] - ends[self.bounds[:-1]]

    @cached_property
    def first_rows(self) -> np.ndarray:
        """First local row of every span, int64 [spans]."""
        ends = np.concatenate([[0], np.cumsum(self.spans["stop"] - self.spans["start"])])
        return ends[:-1] - np.repeat(ends[self.bounds[:-1]], np.diff(self.bounds))

    def tokens(self, rank: int) -> np.ndarray:
        """Token number of each local row, int64 [t], ascending."""
        s = self.of(rank)
        return expand(s["start"], s["stop"] - s["start"])

    def document_ids(self, rank: int) -> np.ndarray:
        """Document of each local row, int64 [t]."""
        s = self.of(rank)
        return np.repeat(s["doc"], s["stop"] - s["start"])

    def positions(self, rank: int) -> np.ndarray:
        """Position of each local row in its document, int64 [t]."""
        s = self.of(rank)
        return expand(s["start"] - self.documents.offsets[s["doc"]], s["stop"] - s["start"])

    def cu_seqlens(self, rank: int) -> np.ndarray:
        """Cumulative local rows per document, int32 [documents + 1]; a document with no row here adds nothing."""
        s = self.of(rank)
        rows = np.bincount(s["doc"], weights=s["stop"] - s["start"], minlength=len(self.documents))
        return np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)

    def head_range(self, rank: int, heads: int) -> tuple[int, int]:
        """First and last-plus-one head of the rank, of `heads` in all."""
        return (0, heads) if self.heads is None else (int(self.heads[rank, 0]), int(self.heads[rank, 1]))

    def with_heads(self, heads: np.ndarray) -> Layout:
        """The same tokens with a range of heads for each rank, [ranks, 2]."""
        return replace(self, heads=np.asarray(heads, np.int64).reshape(self.ranks, 2))

    def same_as(self, other: Layout) -> bool:
        """True when both give every rank the same rows and heads."""
        if self is other:
            return True
        same_heads = (self.heads is None and other.heads is None) or (
            self.heads is not None and other.heads is not None and np.array_equal(self.heads, other.heads)
        )
        return self.ranks == other.ranks and same_heads and np.array_equal(self.spans, other.spans)

    def shard(self, x: Any, rank: int) -> Any:
        """The rank's rows (and heads) of x.

        Args:
            x: numpy array or torch tensor [tokens, ...]; [tokens, heads, ...] when the layout splits heads.
            rank: context-parallel rank.

        Returns:
            [t, ...], a copy; differentiable for a tensor that requires gradients.

        Raises:
            ConfigError: x is no array or tensor, or has another number of tokens, or the rank does not exist.
        """
        self._check_rank(rank)
        _check_array("shard: x", x, 1 if self.heads is None else 2)
        if len(x) != self.documents.tokens:
            raise ConfigError(f"shard: x has {len(x)} rows, but the documents have {self.documents.tokens} tokens")
        rows = x[self.tokens(rank)]
        return rows if self.heads is None else rows[:, self.heads[rank, 0] : self.heads[rank, 1]]

    def unshard(self, parts: Sequence[Any], heads: int | None = None) -> Any:
        """The inverse of :meth:`shard`.

        Args:
            parts: one array or tensor [t, ...] for every rank, in the order of ranks.
            heads: heads in all; needed only when the layout splits heads.

        Returns:
            [tokens, ...] of the type of the parts.

        Raises:
            ConfigError: a part is missing, no array or tensor, or has another number of rows than the layout.
        """
        if len(parts) != self.ranks:
            raise ConfigError(f"unshard: {len(parts)} parts for {self.ranks} ranks")
        for rank, (part, rows) in enumerate(zip(parts, self.token_counts, strict=True)):
            _check_array(f"unshard: the part of rank {rank}", part, 1 if self.heads is None else 2)
            if len(part) != rows:
                raise ConfigError(f"unshard: the part of rank {rank} has {len(part)} rows, the layout has {rows}")
            tail_at = 1 if self.heads is None else 2
            if part.shape[tail_at:] != parts[0].shape[tail_at:] or part.dtype != parts[0].dtype:
                raise ConfigError(
                    f"unshard: the part of rank {rank} is {part.dtype} {list(part.shape)}, that of rank 0 "
                    f"{parts[0].dtype} {list(parts[0].shape)}; types and all but the rows must agree"
                )
        if self.heads is not None and (not is_whole(heads) or heads < int(self.heads.max(initial=0))):  # type: ignore[operator]
            raise ConfigError(
                f"unshard: this layout splits heads, so the number of heads must be given: {heads!r}; valid: "
                f"{int(self.heads.max(initial=0))} or more"
            )
        tail = tuple(parts[0].shape[1:]) if self.heads is None else (heads, *parts[0].shape[2:])
        shape = (self.documents.tokens, *tail)
        first = parts[0]
        out = np.empty(shape, first.dtype) if isinstance(first, np.ndarray) else first.new_empty(shape)
        for rank, part in enumerate(parts):
            if self.heads is None:
                out[self.tokens(rank)] = part
            else:
                out[self.tokens(rank), self.heads[rank, 0] : self.heads[rank, 1]] = part
        return out

    def check(self, heads: int | None = None, replicated: bool = False) -> None:
        """Raise PlanError unless the laws hold.

        Args:
            heads: heads in all, for layouts that split them.
            replicated: True where a (token, head) may be held by several ranks (kv heads).
        """
        s, offsets = self.spans, self.documents.offsets
        bad = np.flatnonzero(
            (s["rank"] < 0) | (s["rank"] >= self.ranks) | (s["doc"] < 0) | (s["doc"] >= len(self.documents))
        )
        if len(bad):
            raise PlanError(f"layout: span {Span(*map(int, s[bad[0]]))} names a rank or document that does not exist")
        outside = (s["start"] < offsets[s["doc"]]) | (s["stop"] > offsets[s["doc"] + 1]) | (s["stop"] <= s["start"])
        if outside.any():
            raise PlanError(f"layout: {Span(*map(int, s[np.argmax(outside)]))} is empty or leaves its document")
        behind = (s["rank"][1:] < s["rank"][:-1]) | (
            (s["rank"][1:] == s["rank"][:-1]) & (s["start"][1:] < s["stop"][:-1])
        )
        if behind.any():
            at = Span(*map(int, s[1 + int(np.argmax(behind))]))
            raise PlanError(f"layout: rank {at.rank}: {at} does not follow the span before it in token order")
        ranges = [(0, 1) if heads is None else self.head_range(rank, heads) for rank in range(self.ranks)]
        borders = np.unique([0, 1 if heads is None else heads, *np.ravel(ranges)])  # heads between two are held alike
        held = np.zeros((self.documents.tokens + 1, len(borders) - 1), np.int32)
        for rank, (first, last) in enumerate(ranges):
            if heads is not None and not 0 <= first <= last <= heads:
                raise PlanError(f"layout: rank {rank}: heads {first} to {last - 1} are not among the {heads} heads")
            mine, low, high = self.of(rank), *np.searchsorted(borders, (first, last))
            np.add.at(held[:, low:high], mine["start"], 1)
            np.add.at(held[:, low:high], mine["stop"], -1)
        times = np.cumsum(held, 0, out=held)[:-1]
        wrong = np.argwhere(times < 1 if replicated else times != 1)
        if len(wrong):
            token, column = map(int, wrong[0])
            raise PlanError(
                f"layout: token {token} (document {int(self.documents.document_of(np.asarray(token)))}), head "
                f"{borders[column]} is held by {int(times[token, column])} ranks, not by one"
            )

    def _check_rank(self, rank: int) -> None:
        if not is_whole(rank) or not 0 <= rank < self.ranks:
            raise ConfigError(f"rank {rank!r} does not exist: this layout has ranks 0 to {self.ranks - 1}")


def _check_array(name: str, x: object, dims: int) -> None:
    """ConfigError unless x is a numpy array or a torch tensor of so many dims at least."""
    shape = getattr(x, "shape", None)
    if not isinstance(shape, tuple) or not (isinstance(x, np.ndarray) or hasattr(x, "new_empty")):
        raise ConfigError(f"{name} is a {type(x).__name__}; valid: a numpy array or a torch tensor")
    if len(shape) < dims:
        axes = "[tokens, ...]" if dims == 1 else "[tokens, heads, ...], as this layout splits heads"
        raise ConfigError(f"{name} has shape {list(shape)}; valid: {axes}")


def is_whole(value: object) -> bool:
    """True for a whole number, Python's or NumPy's; a truth value is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
