"""Documents: the lengths of the documents in a packed batch, and blocks of their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.runs import as_integers, ragged_arange
from mindspeed_cp.layout.trees import Trees, TreeTargets, checked_parents, shared_prefixes
from mindspeed_cp.schema.numbers import is_int

MAX_TOKENS = 2**31 - 1  # cumulative lengths are int32 in every fused attention operator

_WHOLE_ROWS = "0: rows are whole, not yet cut over ranks (by get_batch_on_this_cp_rank)"


class Documents:
    """Lengths of the documents of one packed batch.

    Documents are packed back to back. Tokens are numbered 0 .. tokens-1 over the whole batch; positions restart at 0 in
    every document::

        lengths   [ 5000 | 37 |  1200 ]
        offsets   0     5000  5037   6237

    A document may continue another one, its parent (:mod:`mindspeed_cp.layout.trees`): it then sees its parent's
    tokens and those of all further ancestors, and its positions follow theirs. Tokens of a block
    (:class:`Blocks`), such as those of an image, see each other both ways. Both are for causal masks.

    Objects with equal lengths, parents and blocks are equal and have equal hashes: a cache of plans has them as keys.

    What a program has instead of lengths is converted by :meth:`from_cu_seqlens`, :meth:`from_eod` and
    :meth:`from_position_ids`. These take NumPy arrays, lists, and tensors on the host (anything with ``__array__``).

    Attributes:
        lengths: token counts, int64 [documents], read-only.
        trees: the trees that the documents form; None if no document continues another.
        blocks: the blocks of tokens that see each other both ways; None if there is none.

    Args:
        lengths: token count of each document; documents of length 0 and empty batches are allowed.
        parents: for each document the number of an earlier one that it continues, or -1; documents that continue
            another one follow it side by side (preorder). Default: none continues another.
        blocks: first and last-plus-one token of each run of tokens that see each other both ways, [blocks, 2],
            ascending; each is in one document. Default: none.

    Raises:
        ConfigError: a length is negative or not an integer, the batch has more than 2**31 - 1 tokens, parents are not
            those of trees in preorder, or blocks overlap or cross documents.
    """

    def __init__(
        self,
        lengths: Iterable[int] | np.ndarray,
        parents: Iterable[int] | np.ndarray | None = None,
        blocks: Iterable[Iterable[int]] | np.ndarray | None = None,
    ) -> None:
        values = as_integers("lengths", lengths, 1)
        bad = np.flatnonzero((values < 0) | (values > MAX_TOKENS))
        if len(bad):
            raise ConfigError(
                f"document {bad[0]} has length {values[bad[0]]}; valid: 0 to {MAX_TOKENS}; split longer documents"
            )
        if values.sum() > MAX_TOKENS:
            raise ConfigError(f"the batch has {values.sum()} tokens; valid: at most {MAX_TOKENS}; split the batch")
        values.setflags(write=False)
        self.lengths = values
        self.trees: Trees | None = None
        if parents is not None:
            checked = checked_parents(as_integers("parents", parents, 1), len(values))
            self.trees = Trees(checked, values) if (checked >= 0).any() else None
        self.blocks: Blocks | None = None
        if blocks is not None:
            spans = as_integers("blocks", blocks, 2, "shape [blocks, 2], first and last-plus-one token of each block")
            self.blocks = checked_blocks(spans, self.offsets) if len(spans) else None

    @classmethod
    def from_lengths(cls, lengths: Any) -> Documents:
        """Make documents from token counts: ``Documents(lengths)``.

        >>> Documents.from_lengths([3, 0, 4])
        Documents([3, 0, 4], tokens=7)

        Args:
            lengths: token count of each document, [documents].

        Raises:
            ConfigError: not integers of this shape, or a length is negative.
        """
        return cls(lengths)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any) -> Documents:
        """Make documents from cumulative lengths, as FlashAttention and Megatron's PackedSeqParams have them.

        >>> Documents.from_cu_seqlens([0, 3, 3, 7])
        Documents([3, 0, 4], tokens=7)

        Args:
            cu_seqlens: 0, then the end of each document, [documents + 1]; :attr:`offsets` is the inverse.

        Raises:
            ConfigError: not integers of this shape, or they do not start at 0, or decrease.
        """
        ends = as_integers("cu_seqlens", cu_seqlens, 1)
        if not len(ends):
            raise ConfigError("cu_seqlens is empty; valid: 0, then the end of each document")
        if ends[0] != 0:
            raise ConfigError(f"cu_seqlens starts at {ends[0]}; valid: 0, then the end of each document")
        falls = np.flatnonzero(ends[1:] < ends[:-1])
        if len(falls):
            i = int(falls[0])
            raise ConfigError(
                f"cu_seqlens[{i + 1}] is {ends[i + 1]} after {ends[i]}; valid: {ends[i]} or more, the end of document "
                f"{i} in the whole row (for lengths use Documents.from_lengths)"
            )
        return cls(np.diff(ends))

    @classmethod
    def from_eod(cls, tokens: Any, eod: int) -> Documents:
        """Make documents that end with their end-of-document token, as Megatron's ``--reset-attention-mask`` does.

        The token belongs to the document before it, so each of several in a row is a document of one token. Tokens
        after the last one are a document too, and so is the end of each row:

        >>> Documents.from_eod([5, 6, 0, 0, 7], eod=0)
        Documents([3, 1, 1], tokens=5)
        >>> Documents.from_eod([[5, 6, 0], [7, 8, 9]], eod=0)
        Documents([3, 3], tokens=6)

        Args:
            tokens: token numbers, [tokens] or [rows, tokens].
            eod: number of the end-of-document token.

        Raises:
            ConfigError: not integers of these shapes.
        """
        if not is_int(eod):
            raise ConfigError(f"eod is {eod!r}; valid: the number of the end-of-document token")
        is_end = np.atleast_2d(as_integers("tokens", tokens, 2)) == eod
        is_end[:, -1:] = True
        return cls(np.diff(np.flatnonzero(is_end), prepend=-1))

    @classmethod
    def from_position_ids(cls, position_ids: Any) -> Documents:
        """Make documents from positions that restart at 0 in each document and rise by one inside it.

        Documents without tokens leave no trace in positions, and a row ends a document:

        >>> Documents.from_position_ids([0, 1, 2, 0, 0, 1])
        Documents([3, 1, 2], tokens=6)

        Args:
            position_ids: positions, [tokens] or [rows, tokens].

        Raises:
            ConfigError: not integers of these shapes, or a position neither follows the one before nor is 0; names its
                index.
        """
        array = as_integers("position_ids", position_ids, 2)
        rows = np.atleast_2d(array)
        is_start = rows == 0
        follows = np.zeros(rows.shape, bool)
        follows[:, 1:] = rows[:, 1:] == rows[:, :-1] + 1
        wrong = np.argwhere(~(is_start | follows))
        if len(wrong):
            row, i = map(int, wrong[0])
            index = f"{i}" if array.ndim == 1 else f"{row}, {i}"
            valid = (
                f"{rows[row, i - 1] + 1}, the next of its document, or 0, the first of another" if i else _WHOLE_ROWS
            )
            after = f" after {rows[row, i - 1]}" if i else ", the first of a row"
            raise ConfigError(f"position_ids[{index}] is {rows[row, i]}{after}; valid: {valid}")
        return cls(np.diff(np.append(np.flatnonzero(is_start), rows.size)))

    @classmethod
    def from_trajectories(
        cls, trajectories: Iterable[Any], min_shared: int = 1, must_share: bool = True
    ) -> PackedTrajectories:
        """Pack trajectories as trees: every prefix that several of them share is one document, which they continue.

        >>> packed = Documents.from_trajectories([[1, 2, 3, 4], [1, 2, 5], [9, 9]])
        >>> packed.documents
        Documents([2, 2, 1, 2], parents=[-1, 0, 0, -1], tokens=7)
        >>> packed.tree_tokens[1]
        array([0, 1, 4])

        Args:
            trajectories: token numbers of each trajectory, lists or arrays of one token or more. Equal ones become one.
            min_shared: least number of first tokens that trajectories must have in common to be one tree. A larger one
                keeps trajectories apart that share little, such as a first token that all have: a tree is placed as
                one, so smaller trees leave the planner more choice.
            must_share: refuse trajectories of which no two share a prefix.

        Returns:
            The documents, their tokens, and the tree token of each trajectory's token
            (:class:`mindspeed_cp.layout.trees.PackedTrajectories`).

        Raises:
            ConfigError: a trajectory is not a list of token numbers, or has none, or no two share a prefix.
        """
        lengths, parents, tokens, tree_tokens = shared_prefixes(trajectories, min_shared, must_share)
        return PackedTrajectories(cls(lengths, parents), tokens, tuple(tree_tokens))

    @cached_property
    def offsets(self) -> np.ndarray:
        """First token of each document, followed by the number of tokens; int64 [documents + 1], read-only."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        offsets.setflags(write=False)
        return offsets

    @property
    def is_plain(self) -> bool:
        """True if no document continues another, and there is no block."""
        return self.trees is None and self.blocks is None

    @cached_property
    def parents(self) -> np.ndarray:
        """The document that each document continues, or -1; int64 [documents], read-only."""
        parents = np.full(len(self), -1) if self.trees is None else self.trees.parents
        parents.setflags(write=False)
        return parents

    @cached_property
    def first_positions(self) -> np.ndarray:
        """Position of each document's first token, 0 unless it continues another one; int64 [documents]."""
        return np.zeros(len(self), np.int64) if self.trees is None else self.trees.first_positions

    @cached_property
    def roots(self) -> np.ndarray:
        """Root of each document, itself unless it continues another; int64 [documents]."""
        return np.arange(len(self)) if self.trees is None else self.trees.roots

    @cached_property
    def tree_numbers(self) -> np.ndarray:
        """Number of the tree that each document is in; a document without parent and children is one by itself; int64
        [documents]."""
        return np.arange(len(self)) if self.trees is None else np.cumsum(self.trees.parents < 0) - 1

    def tree_sums(self, values: np.ndarray) -> np.ndarray:
        """Sum values of documents over each tree, [documents] to [trees]."""
        if self.trees is None:
            return values
        return np.add.reduceat(values, np.flatnonzero(self.parents < 0))

    @property
    def tokens(self) -> int:
        """Number of tokens in the batch."""
        return int(self.offsets[-1])

    def document_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return the document of each token number; int64, the shape of `tokens`."""
        return np.searchsorted(self.offsets, tokens, "right") - 1

    def seen_documents(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each of some documents, those whose keys its queries may see: its ancestors, and itself.

        Args:
            documents: numbers of documents, int64 [n].

        Returns:
            Index in `documents` and document seen, int64 each, in the order of indices and from the root down.
        """
        if self.trees is None:
            return np.arange(len(documents)), documents
        return self.trees.with_ancestors(documents)

    def with_lengths(self, lengths: np.ndarray) -> Documents:
        """Return documents of their own lengths or none, with the same parents and blocks; those of documents without
        tokens are kept for later."""
        out = Documents(lengths, None if self.trees is None else self.trees.parents)
        out.blocks = None if self.blocks is None else replace(self.blocks, offsets=out.offsets)
        return out

    def copies(self, count: int) -> Documents:
        """Return a batch of copies of all documents, one after the other."""
        parents = blocks = None
        if self.trees is not None:
            shift = np.repeat(np.arange(count) * len(self), len(self))
            parents = np.tile(self.parents, count)
            parents = np.where(parents >= 0, parents + shift, -1)
        if self.blocks is not None:
            spans = np.stack([self.blocks.start, self.blocks.stop], 1)
            blocks = (np.arange(count)[:, None, None] * self.tokens + spans).reshape(-1, 2)
        return Documents(np.tile(self.lengths, count), parents, blocks)

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> tuple[bytes, bytes, bytes]:
        """Lengths, parents and blocks as bytes: equal for equal documents."""
        parents = b"" if self.trees is None else self.parents.tobytes()
        return self.lengths.tobytes(), parents, b"" if self.blocks is None else self.blocks.records.tobytes()

    def __repr__(self) -> str:
        parents = "" if self.trees is None else f", parents=[{_shown(self.parents)}]"
        blocks = "" if self.blocks is None else f", blocks={len(self.blocks.doc)}"
        return f"Documents([{_shown(self.lengths)}]{parents}{blocks}, tokens={self.tokens})"


@dataclass(frozen=True, eq=False)
class PackedTrajectories:
    """Trajectories packed as trees.

    Attributes:
        documents: the trees, with parents.
        tokens: token numbers of the batch, in the order of the documents, int64 [tokens].
        tree_tokens: for each trajectory the tree token that stands for each of its tokens, int64 [length] each: a
            result x of the tree, such as log-probabilities, is ``x[tree_tokens[i]]`` for trajectory i.
    """

    documents: Documents
    tokens: np.ndarray
    tree_tokens: tuple[np.ndarray, ...]

    @cached_property
    def targets(self) -> TreeTargets:
        """Tokens to predict, each once."""
        source = np.concatenate([path[:-1] for path in self.tree_tokens])
        follower = np.concatenate([path[1:] for path in self.tree_tokens])
        pairs, index = np.unique(np.stack([source, follower]), axis=1, return_inverse=True)
        ends = np.cumsum([len(path) - 1 for path in self.tree_tokens])
        return TreeTargets(pairs[0], self.tokens[pairs[1]], tuple(np.split(index.reshape(-1), ends[:-1])))


def _shown(values: np.ndarray) -> str:
    """Return the first numbers of an array."""
    return ", ".join(map(str, values[:6])) + (f", ... {len(values)} in all" if len(values) > 6 else "")


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a batch, ascending: runs of tokens of a document that see each other both ways under a causal mask.

    Image tokens inside a text, or the prompt of a prefix language model. A query in a block sees, besides what the mask
    lets it see, the whole block; a window does not hide tokens of its own block. All other queries see blocks
    causally::

        tokens    a b [c d e] f       a sees a, b sees a b, c and d and e see a b c d e, f sees a b c d e f

    Attributes:
        doc: document of each block, int64 [blocks].
        first, last: first and last-plus-one token of each block, counted from the document's first, int64 [blocks].
        offsets: first token of each document of the batch, followed by the number of tokens, int64 [documents + 1].
            Blocks of a document that has no tokens in this batch, as in a part of a plan, are not in it.
    """

    doc: np.ndarray
    first: np.ndarray
    last: np.ndarray
    offsets: np.ndarray

    @cached_property
    def _present(self) -> np.ndarray:
        return np.flatnonzero(self.offsets[self.doc + 1] > self.offsets[self.doc])

    @cached_property
    def start(self) -> np.ndarray:
        """First token of each block in the batch, int64 [present blocks]."""
        return (self.offsets[self.doc] + self.first)[self._present]

    @cached_property
    def stop(self) -> np.ndarray:
        """Last-plus-one token of each block in the batch, int64 [present blocks]."""
        return (self.offsets[self.doc] + self.last)[self._present]

    @property
    def records(self) -> np.ndarray:
        """Document, first and last-plus-one token of each block, int64 [blocks, 3]."""
        return np.stack([self.doc, self.first, self.last], 1)

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Return the block of each token, or -1; int64, the shape of `tokens`."""
        index = np.searchsorted(self.start, tokens, "right") - 1
        inside = (index >= 0) & (tokens < self.stop[index]) if len(self.stop) else np.zeros(np.shape(tokens), bool)
        return np.where(inside, index, -1)

    @property
    def seen_labels(self) -> np.ndarray:
        """Tokens that see the one after them, as both are in one block, and cannot learn to predict it; int64 [n]."""
        return ragged_arange(self.start, self.stop - self.start - 1)

    def cut(self, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut token spans where blocks begin and end.

        Args:
            spans: records of dtype TOKEN_SPAN.

        Returns:
            The spans, index in `spans` and block (or -1) of each, int64 [n] each.
        """
        edges = np.unique(np.concatenate([self.start, self.stop]))
        begin = np.searchsorted(edges, spans["start"], "right")
        inside = np.maximum(np.searchsorted(edges, spans["stop"], "left") - begin, 0)
        source = np.repeat(np.arange(len(spans)), inside + 1)
        out = spans[source]
        is_last = np.zeros(len(source), bool)
        is_last[np.cumsum(inside + 1) - 1] = True
        is_first = np.append(True, is_last[:-1])[: len(source)]
        cuts = edges[ragged_arange(begin, inside)]
        out["stop"][~is_last], out["start"][~is_first] = cuts, cuts
        return out, source, self.of(out["start"])

    def pairs_before(self, tokens: np.ndarray, left: int) -> np.ndarray:
        """Count the pairs that blocks add to those of a causal mask with a window of `left`, over all queries before
        each token; int64, the shape of `tokens`."""
        size = self.stop - self.start
        before = np.concatenate([[0], np.cumsum(_added_pairs(size, size, left))])
        index = np.searchsorted(self.start, tokens, "right") - 1
        if not len(size):
            return np.zeros(np.shape(tokens), np.int64)
        queries = np.clip(tokens - self.start[index], 0, size[index])
        return np.where(index >= 0, before[index] + _added_pairs(queries, size[index], left), 0)


def _added_pairs(queries: np.ndarray, size: np.ndarray, left: int) -> np.ndarray:
    """Count the keys of a block that a causal mask with a window hides from its first queries.

    Query i hides the size - 1 - i keys after it and, in a window, max(0, i - left) keys of the block before it.
    """
    hidden = np.maximum(queries - 1 - left, 0)
    return queries * (size - 1) - queries * (queries - 1) // 2 + hidden * (hidden + 1) // 2


def checked_blocks(blocks: np.ndarray, offsets: np.ndarray) -> Blocks:
    """Return the blocks of a batch.

    Args:
        blocks: first and last-plus-one token of each block, int64 [blocks, 2].
        offsets: first token of each document, followed by the number of tokens.

    Raises:
        ConfigError: a block is empty, out of the batch, crosses a document's border, or overlaps or precedes the one
            before it; names the block.
    """
    if blocks.ndim != 2 or blocks.shape[1:] != (2,):
        raise ConfigError(
            f"blocks has shape {list(blocks.shape)}; valid: [blocks, 2], first and last-plus-one token of each block"
        )
    start, stop = np.ascontiguousarray(blocks[:, 0]), np.ascontiguousarray(blocks[:, 1])
    wrong = np.flatnonzero((start < 0) | (stop <= start) | (stop > offsets[-1]))
    if len(wrong):
        number = int(wrong[0])
        raise ConfigError(
            f"blocks[{number}] is {blocks[number].tolist()}; valid: a first token and a last-plus-one token after it, "
            f"0 to {offsets[-1]}"
        )
    behind = np.flatnonzero(start[1:] < stop[:-1])
    if len(behind):
        number = int(behind[0])
        raise ConfigError(
            f"blocks[{number + 1}] is {blocks[number + 1].tolist()}, but blocks[{number}] is "
            f"{blocks[number].tolist()}; valid: blocks in ascending order that do not overlap"
        )
    doc = np.searchsorted(offsets, start, "right") - 1
    crossing = np.flatnonzero(stop > offsets[doc + 1])
    if len(crossing):
        number = int(crossing[0])
        raise ConfigError(
            f"blocks[{number}] is {blocks[number].tolist()}, but document {doc[number]} ends at token "
            f"{offsets[doc[number] + 1]}; valid: a block of tokens of one document"
        )
    return Blocks(doc, start - offsets[doc], stop - offsets[doc], offsets)
