"""Redistribution: the all-to-all-v that moves rows and heads from one layout to another, and its adjoint.

One primitive for Ulysses (tokens to heads), for the inner part of the hybrid, and for the move between the layouts of
attention and of linear layers. For each pair of ranks it lists the (token, head) that one rank holds in the source and
the other needs in the target, as runs of rows and a range of heads. Rows that stay on a rank are copied, not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout.documents import Documents
from mindspeed_cp.layout.layout import Layout
from mindspeed_cp.layout.runs import ROW_RUN, intersect_runs, join_runs, ragged_arange

#: What one rank gives another of several tensors that move together, such as q, k and v, is one message if that has at
#: most so many bytes. A host then posts fewer, and HcclBatchSendRecv of CANN 8, which takes one to each rank, has
#: fewer launches. Larger ones take longer to travel than to post, and packing them takes memory at both ends.
PACKED_BYTES = 4 * 2**20

#: Rank `src` gives rank `dst` `rows` rows, runs[first : first + count], of heads head .. head + heads - 1, numbered
#: over all heads.
RANK_PAIR = np.dtype([(name, np.int64) for name in ["src", "dst", "first", "count", "rows", "head", "heads"]])


@dataclass(frozen=True, eq=False)
class Redistribution:
    """Move of rows and heads from the layout `source` to the layout `target`, by all-to-all-v.

    In the source every token is on one rank with all its heads; in the target ranks may have ranges of heads, and a
    (token, head) may be on several ranks. The adjoint moves from target to source and sums the copies.

    Attributes:
        source: layout with all heads on every rank.
        target: layout of the same documents and ranks.
        heads: total number of heads.

    Raises:
        PlanError: the source splits heads, or the layouts have different ranks or documents.
    """

    source: Layout
    target: Layout
    heads: int

    def __post_init__(self) -> None:
        if self.source.heads is not None:
            raise PlanError("redistribution: the source splits heads; only a layout with all heads can be a source")
        if self.source.ranks != self.target.ranks or self.source.documents != self.target.documents:
            raise PlanError("redistribution: source and target have different ranks or documents")

    @staticmethod
    def between(source: Layout, target: Layout, heads: int) -> Redistribution | None:
        """Return the redistribution from source to target, or None if both layouts are the same."""
        return None if source.same_as(target) else Redistribution(source, target, heads)

    @cached_property
    def _pairs_and_runs(self) -> tuple[np.ndarray, np.ndarray]:
        source, target = self.source, self.target
        by_token = np.argsort(source.spans["start"], kind="stable")
        given, given_row = source.spans[by_token], source.span_first_rows[by_token]
        low, heads = target.head_bounds(self.heads)[:, 0], target.head_counts(self.heads)
        used = heads[target.spans["rank"]] > 0
        wanted, wanted_row = target.spans[used], target.span_first_rows[used]
        w, g, first, last = intersect_runs(wanted["start"], wanted["stop"], given["start"], given["stop"])
        pieces = np.empty(len(w), ROW_RUN)
        pieces["src_row"] = given_row[g] + first - given["start"][g]
        pieces["dst_row"] = wanted_row[w] + first - wanted["start"][w]
        pieces["rows"] = last - first
        src, dst = given["rank"][g], wanted["rank"][w]
        order = np.lexsort((src, dst))  # stable: within one pair, token order is row order on both sides
        src, dst, pieces = src[order], dst[order], pieces[order]
        new_pair = np.append(True, (src[1:] != src[:-1]) | (dst[1:] != dst[:-1]))[: len(src)]
        runs, begins = join_runs(pieces, ("src_row", "dst_row"), new_pair)
        starts = np.flatnonzero(new_pair[begins])
        pairs = np.empty(len(starts), RANK_PAIR)
        pairs["src"], pairs["dst"] = src[begins[starts]], dst[begins[starts]]
        pairs["first"], pairs["count"] = starts, np.diff(np.append(starts, len(runs)))
        pairs["rows"] = np.add.reduceat(runs["rows"], starts) if len(starts) else 0
        pairs["head"], pairs["heads"] = low[pairs["dst"]], heads[pairs["dst"]]
        return pairs, runs

    @property
    def rank_pairs(self) -> np.ndarray:
        """Records of dtype RANK_PAIR, one for each pair of ranks with rows to move; src and dst may be equal."""
        return self._pairs_and_runs[0]

    @cached_property
    def remote_pairs(self) -> np.ndarray:
        """Records of dtype RANK_PAIR of different ranks."""
        pairs = self.rank_pairs
        return pairs[pairs["src"] != pairs["dst"]]

    @property
    def runs(self) -> np.ndarray:
        """Records of dtype ROW_RUN."""
        return self._pairs_and_runs[1]

    def runs_of(self, pair: np.ndarray) -> np.ndarray:
        """Return the runs of one rank pair, records of dtype ROW_RUN."""
        return self.runs[pair["first"] : pair["first"] + pair["count"]]

    def sends_and_receives(self, rank: int, adjoint: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the rank pairs that a rank sends and those that it receives, each in posting order.

        The order pairs ranks by XOR, so that no rank and no NIC is the target of all others at once. The adjoint
        exchanges the directions.
        """
        sender, receiver = ("dst", "src") if adjoint else ("src", "dst")
        remote = self.remote_pairs
        sends, receives = remote[remote[sender] == rank], remote[remote[receiver] == rank]
        return (
            sends[np.argsort(sends[receiver] ^ rank, kind="stable")],
            receives[np.argsort(rank ^ receives[sender], kind="stable")],
        )

    def local_pair(self, rank: int) -> np.ndarray | None:
        """Return the pair of the rank with itself, or None if no row stays there."""
        index = np.flatnonzero((self.rank_pairs["src"] == rank) & (self.rank_pairs["dst"] == rank))
        return self.rank_pairs[index[0]] if len(index) else None

    @cached_property
    def has_copies(self) -> bool:
        """True if a (token, head) is on several ranks of the target."""
        held = int(self.target.token_counts @ self.target.head_counts(self.heads))
        return held > self.source.documents.tokens * self.heads


#: A redistribution, the bytes of a row of one head, and the number of tensors that have such rows together.
Moved = tuple[Redistribution, float, int]


def is_one_message(sizes: Sequence[int]) -> bool:
    """Return whether rows of several tensors, of so many bytes each, travel between two ranks as one message."""
    return len(sizes) > 1 and sum(sizes) <= PACKED_BYTES


def packed_pairs(moved: Sequence[Moved]) -> list[np.ndarray]:
    """Return which rows of redistributions that are posted together are one message (:func:`is_one_message`).

    Args:
        moved: redistributions between the same ranks.

    Returns:
        For each redistribution, bool [rank_pairs]; for pairs of a rank with itself without meaning.
    """
    keys = [pairs["src"] * each.source.ranks + pairs["dst"] for each, *_ in moved for pairs in [each.rank_pairs]]
    sizes = [each.rank_pairs["rows"] * each.rank_pairs["heads"] * width for each, width, _ in moved]
    _, message = np.unique(np.concatenate([np.zeros(0, np.int64), *keys]), return_inverse=True)
    message = message.reshape(-1)
    size = np.bincount(message, np.concatenate([np.zeros(0), *sizes]))
    tensors = np.bincount(message, np.repeat([count for *_, count in moved], [len(key) for key in keys]))
    packed = ((tensors > 1) & (size <= PACKED_BYTES))[message]
    return np.split(packed, np.cumsum([len(key) for key in keys])[:-1]) if moved else []


# Roll: rows that move by k tokens inside their documents, whichever ranks hold them.


@dataclass(frozen=True, eq=False)
class Roll:
    """Every row gets the row that stands `shift` tokens later in its document.

    Multi-token prediction reads tokens, labels and loss masks in this way. The last `shift` rows of a document get a
    fill value, never a row of the next document. Documents of 5 and 2 tokens, shift 1::

        row    a0 a1 a2 a3 a4 b0 b1
        gets   a1 a2 a3 a4 -  b1 -

    A document without its last `shift` tokens is a shorter document. The roll is the redistribution of these shorter
    documents from the ranks that hold token p + shift to the ranks that hold token p; most rows stay on their rank. Its
    adjoint is the roll by -shift.

    Attributes:
        layout: rows of every rank, with all heads.
        shift: number of tokens; negative: rows get those that stand earlier, and the first ones are filled.

    Raises:
        PlanError: the layout splits heads.
        ConfigError: documents continue others, so that what follows a token depends on the branch.
    """

    layout: Layout
    shift: int

    def __post_init__(self) -> None:
        if self.layout.heads is not None:
            raise PlanError("roll: the layout splits heads; only rows with all heads can be rolled")
        if self.layout.documents.trees is not None:
            raise ConfigError(
                "roll: documents have parents, and what follows a token depends on the branch; valid: documents "
                "without parents, or the targets of PackedTrajectories"
            )

    @cached_property
    def documents(self) -> Documents:
        """The documents without `shift` tokens each; those that have no more are empty."""
        return Documents(np.maximum(self.layout.documents.lengths - abs(self.shift), 0))

    @cached_property
    def _source(self) -> tuple[Layout, np.ndarray]:
        return self._without_first(max(self.shift, 0))

    @cached_property
    def _target(self) -> tuple[Layout, np.ndarray]:
        return self._without_first(max(-self.shift, 0))

    @cached_property
    def redistribution(self) -> Redistribution:
        """The move of the shorter documents: `sends_and_receives` and `local_pair` list the rows of each pair of ranks.

        Row numbers are indices in :meth:`source_rows` of the sender and :meth:`target_rows` of the receiver.
        """
        return Redistribution(self._source[0], self._target[0], 1)

    def source_rows(self, rank: int) -> np.ndarray:
        """Return the rows of a rank that other rows get, ascending, int64."""
        return _rows_of_rank(*self._source, rank)

    def target_rows(self, rank: int) -> np.ndarray:
        """Return the rows of a rank that get a row, ascending, int64; its other rows are filled."""
        return _rows_of_rank(*self._target, rank)

    def _without_first(self, skipped: int) -> tuple[Layout, np.ndarray]:
        """Return the layout in which token p of each shorter document is where its token p + `skipped` was, and the
        row that the first token of each span had, int64 [spans]."""
        spans, short = self.layout.spans, self.documents
        doc = spans["doc"]
        begin, end = (spans[side] - self.layout.documents.offsets[doc] for side in ("start", "stop"))
        first, last = (np.clip(position - skipped, 0, short.lengths[doc]) for position in (begin, end))
        kept = last > first
        out = spans[kept]
        out["start"], out["stop"] = (short.offsets[doc] + first)[kept], (short.offsets[doc] + last)[kept]
        first_rows = self.layout.span_first_rows + first + skipped - begin
        return Layout(short, self.layout.ranks, out), first_rows[kept]


def _rows_of_rank(layout: Layout, first_rows: np.ndarray, rank: int) -> np.ndarray:
    spans = layout.rank_spans(rank)
    first = first_rows[layout.span_offsets[rank] : layout.span_offsets[rank + 1]]
    return ragged_arange(first, spans["stop"] - spans["start"])
