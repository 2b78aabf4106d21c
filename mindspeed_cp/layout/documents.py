"""Documents: the lengths of the documents in a packed batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.blocks import Blocks, checked_blocks
from mindspeed_cp.layout.runs import as_integers
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
    (:mod:`mindspeed_cp.layout.blocks`), such as those of an image, see each other both ways. Both are for causal masks.

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
        return np.cumsum(self.parents < 0) - 1

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
