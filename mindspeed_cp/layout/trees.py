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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.runs import as_integers, ragged_arange
from mindspeed_cp.schema.numbers import check_count, check_type


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


# Trajectories as trees: shared prefixes are found and stored once, and every token to predict is listed once.
#
# Answers sampled for one prompt, or an agent's traces that branch, begin alike. `Documents.from_trajectories` makes one
# document of every run of tokens that the same trajectories share::
#
#     trajectories      1 2 3 4 5        documents   0: 1 2 3      parents  -1
#                       1 2 3 4 6                    1: 4                    0
#                       1 2 3 7                      2: 5                    1
#                                                    3: 6                    1
#                                                    4: 7                    0
#
# A model computes each tree token once. What it has to predict are pairs of a tree token and a token that follows it:
# token 3 is followed by 4 and by 7 and has two targets. The loss of all trajectories is a sum over targets.


@dataclass(frozen=True, eq=False)
class TreeTargets:
    """Tokens to predict: each pair of a tree token and a token that follows it in some trajectory, once.

    Attributes:
        source: tree token whose logits predict the target, int64 [targets], ascending.
        token: number of the token to predict, int64 [targets].
        of_trajectories: for each trajectory the targets of its tokens but the first, int64 [length - 1] each.
    """

    source: np.ndarray
    token: np.ndarray
    of_trajectories: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_first(self) -> np.ndarray:
        """True for the first target of each tree token; the others are those of tokens after which trajectories branch;
        bool [targets]."""
        return np.diff(self.source, prepend=-1) != 0

    def weights(self, weights: Sequence[Any] | None = None) -> np.ndarray:
        """Sum the loss weights that trajectories give to targets.

        With them the weighted sum over targets is the weighted sum over the tokens of all trajectories, for a loss that
        depends on the target's logits alone. A loss that differs between trajectories (a ratio to old probabilities,
        clipped) takes the targets' log-probabilities and :attr:`of_trajectories` instead.

        Args:
            weights: for each trajectory the weight of every token as one to predict, [length] (the first is not
                used), or one number for all of them; default: 1.

        Returns:
            fp64 [targets].

        Raises:
            ConfigError: not one entry for each trajectory, its length is not the trajectory's, or a weight is not
                finite.
        """
        if weights is not None:
            check_type("weights", weights, Iterable, "one entry for each trajectory, or None")
        out = np.zeros(len(self))
        given: Sequence[Any] = [1.0] * len(self.of_trajectories) if weights is None else list(weights)
        if len(given) != len(self.of_trajectories):
            raise ConfigError(
                f"weights has {len(given)} entries; valid: one for each of the {len(self.of_trajectories)} trajectories"
            )
        for number, (targets, values) in enumerate(zip(self.of_trajectories, given, strict=True)):
            array = np.asarray(values, np.float64)
            if array.ndim and array.shape != (len(targets) + 1,):
                raise ConfigError(
                    f"weights[{number}] has shape {list(array.shape)}; valid: one number, or [{len(targets) + 1}], one "
                    "for each token of the trajectory"
                )
            if not np.isfinite(array).all():
                raise ConfigError(f"weights[{number}] has values that are not finite; valid: finite numbers")
            np.add.at(out, targets, array[1:] if array.ndim else array)
        return out

    def of_rows(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the targets that a rank's rows predict.

        Args:
            tokens: tree token of each row, ``plan.batch_layout.tokens(rank)``, int64 [t].

        Returns:
            Numbers of targets, and the local row that predicts each, int64 [targets of this rank] each.
        """
        row_of = np.full(max(int(tokens.max(initial=-1)), int(self.source.max(initial=-1))) + 1, -1)
        row_of[tokens] = np.arange(len(tokens))
        targets = np.flatnonzero(row_of[self.source] >= 0)
        return targets, row_of[self.source[targets]]


def shared_prefixes(
    trajectories: Iterable[Any], min_shared: int, must_share: bool
) -> tuple[list[int], list[int], np.ndarray, list[np.ndarray]]:
    """Find the prefixes that trajectories share; arguments and errors as for `Documents.from_trajectories`.

    Returns:
        Lengths and parents of documents in preorder, their tokens, and for each trajectory the tree tokens of its path,
        int64 [length] each.
    """
    check_type("trajectories", trajectories, Iterable, "a list with the token numbers of each trajectory")
    check_count("min_shared", min_shared, what="a whole number of tokens")
    listed = [as_integers(f"trajectories[{i}]", tokens, 1) for i, tokens in enumerate(trajectories)]
    if not listed:
        raise ConfigError("trajectories is empty; valid: the token numbers of one trajectory or more")
    empty = next((i for i, tokens in enumerate(listed) if not len(tokens)), None)
    if empty is not None:
        raise ConfigError(f"trajectories[{empty}] has no tokens; valid: 1 token or more; leave it out")
    lengths: list[int] = []
    parents: list[int] = []
    runs: list[np.ndarray] = []
    paths: list[list[np.ndarray]] = [[] for _ in listed]
    tokens = 0
    open_groups = [(group, 0, -1) for group in reversed(_grouped(listed, range(len(paths)), 0, min_shared))]
    while open_groups:
        group, start, parent = open_groups.pop()
        stop = _shared_until(listed, group, start)
        node = len(lengths)
        lengths.append(stop - start)
        parents.append(parent)
        runs.append(listed[group[0]][start:stop])
        for number in group:
            paths[number].append(np.arange(tokens, tokens + stop - start))
        tokens += stop - start
        going_on = [number for number in group if len(listed[number]) > stop]
        open_groups += [(below, stop, node) for below in reversed(_grouped(listed, going_on, stop, 1))]
    if must_share and len(lengths) == len(listed) and max(parents) < 0:
        least = "token" if min_shared == 1 else f"{min_shared} tokens"
        raise ConfigError(
            f"trajectories: no two of the {len(listed)} begin with the same {least}; valid: trajectories that share "
            "prefixes, or for separate documents Documents(lengths); must_share=False takes any"
        )
    return lengths, parents, np.concatenate(runs), [np.concatenate(path) for path in paths]


def _grouped(trajectories: Sequence[np.ndarray], numbers: Iterable[int], start: int, tokens: int) -> list[list[int]]:
    """Group trajectories by their next tokens, in the order of the first of each group."""
    groups: dict[bytes, list[int]] = {}
    for number in numbers:
        groups.setdefault(trajectories[number][start : start + tokens].tobytes(), []).append(number)
    return list(groups.values())


def _shared_until(trajectories: Sequence[np.ndarray], group: Sequence[int], start: int) -> int:
    """Return the number of tokens that all trajectories of a group have in common; the first `start` are."""
    first, stop = trajectories[group[0]], len(trajectories[group[0]])
    for number in group[1:]:
        other = trajectories[number]
        stop = min(stop, len(other))
        differs = np.flatnonzero(first[start:stop] != other[start:stop])
        stop = start + int(differs[0]) if len(differs) else stop
    return stop
