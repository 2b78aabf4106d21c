"""Trees of documents: a document may continue another one, its parent, and then sees its parent's tokens too.

Answers to one prompt, or branches of an agent's trace, share a prefix. As a tree every shared prefix is stored and
computed once. Documents are numbered in preorder: a parent before its children, and all that continues a document side
by side after it. Positions go on along the path from the root::

    documents        0: prompt    1: answer    2: answer    3: its continuation
    parents          -1           0            0            2
    lengths          5            3            2            4
    positions        0 .. 4       5 .. 7       5 .. 6       7 .. 10

A query of document 3 sees, under a causal mask, documents 0 and 2 and the tokens of document 3 up to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.runs import ragged_arange


@dataclass(frozen=True, eq=False)
class Trees:
    """What follows from the parents of documents; every array is int64 [documents] unless its text says otherwise.

    Attributes:
        parents: parent of each document, -1 for a root; checked by :func:`checked_parents`.
        lengths: tokens of each document.
    """

    parents: np.ndarray
    lengths: np.ndarray

    @cached_property
    def depths(self) -> np.ndarray:
        """Number of ancestors of each document."""
        depths, parents = np.zeros(len(self.parents), np.int64), self.parents
        above = parents.copy()
        while (above >= 0).any():
            depths += above >= 0
            above = np.where(above >= 0, parents[above], -1)
        return depths

    @cached_property
    def ancestor_offsets(self) -> np.ndarray:
        """Offsets of the documents in `ancestors`, int64 [documents + 1]."""
        return np.concatenate([[0], np.cumsum(self.depths)])

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Ancestors of all documents one after the other, from the root down, int64 [sum of depths]."""
        out = np.zeros(int(self.ancestor_offsets[-1]), np.int64)
        last, above = self.ancestor_offsets[1:] - 1, self.parents.copy()
        while (left := above >= 0).any():
            out[last[left]] = above[left]
            last, above = last - 1, np.where(left, self.parents[above], -1)
        return out

    @cached_property
    def roots(self) -> np.ndarray:
        """Root of each document; a root is its own."""
        out = np.arange(len(self.parents))
        below = self.depths > 0
        out[below] = self.ancestors[self.ancestor_offsets[:-1][below]]
        return out

    @cached_property
    def first_positions(self) -> np.ndarray:
        """Position of each document's first token: the tokens of all its ancestors."""
        sums = np.concatenate([[0], np.cumsum(self.lengths[self.ancestors])])
        return sums[self.ancestor_offsets[1:]] - sums[self.ancestor_offsets[:-1]]

    @cached_property
    def subtree_ends(self) -> np.ndarray:
        """Number of the first document after each document's subtree."""
        out = np.arange(1, len(self.parents) + 1)
        np.maximum.at(out, self.ancestors, np.repeat(out.copy(), self.depths))
        return out

    @property
    def leaves(self) -> np.ndarray:
        """Documents that no other continues, int64 [leaves]."""
        return np.setdiff1d(np.arange(len(self.parents)), self.parents)

    def path(self, document: int) -> np.ndarray:
        """Return the ancestors of a document, from the root down, and the document; int64."""
        first, last = self.ancestor_offsets[document : document + 2]
        return np.append(self.ancestors[first:last], document)

    def with_ancestors(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each of some documents, its ancestors from the root down, and itself.

        Args:
            documents: numbers of documents, int64 [n].

        Returns:
            Index in `documents` and document, int64 each.
        """
        count = self.depths[documents] + 1
        index = np.repeat(np.arange(len(documents)), count)
        is_own = np.zeros(len(index), bool)
        is_own[np.cumsum(count) - 1] = True
        out = np.empty(len(index), np.int64)
        out[~is_own] = self.ancestors[ragged_arange(self.ancestor_offsets[documents], self.depths[documents])]
        out[is_own] = documents
        return index, out


def checked_parents(parents: np.ndarray, documents: int) -> np.ndarray:
    """Return parents as int64 [documents], read-only.

    Raises:
        ConfigError: not one for each document, a parent is not an earlier document or -1, or documents are not in
            preorder; names the document.
    """
    if parents.shape != (documents,):
        raise ConfigError(
            f"parents has {parents.size} entries for {documents} documents; valid: one for each document, the number "
            "of the document that it continues, or -1"
        )
    parents = parents.astype(np.int64)
    number = np.arange(documents)
    wrong = np.flatnonzero((parents < -1) | (parents >= number))
    if len(wrong):
        doc = int(wrong[0])
        raise ConfigError(
            f"parents[{doc}] is {parents[doc]}; valid: -1, or the number of an earlier document (0 to {doc - 1}): a "
            "parent comes before the documents that continue it"
            if doc
            else f"parents[0] is {parents[0]}; valid: -1: the first document continues none"
        )
    open_path: list[int] = []  # the path to the last document
    for doc, parent in enumerate(parents.tolist()):
        if parent >= 0 and parent not in open_path:
            raise ConfigError(
                f"parents[{doc}] is {parent}, but document {doc - 1}, before it, is not of the tree below document "
                f"{parent}; valid: preorder, that is, all that continues a document side by side after it "
                "(Documents.from_trajectories makes it)"
            )
        del open_path[open_path.index(parent) + 1 if parent >= 0 else 0 :]
        open_path.append(doc)
    parents.setflags(write=False)
    return parents
