"""A corpus of groups of trajectories, each of which is packed as prefix trees and stays whole.

As a document, a group has its tree tokens: packing and dispatch take it as one. Opening the corpus reads every group
once and keeps the shapes of its trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from mindspeed_cp.data.corpus import STDLIB, open_corpus, user_files
from mindspeed_cp.data.file_corpus import JSON_LINES, printable_path
from mindspeed_cp.data.rollouts import ROLLOUTS, Rollouts, RolloutShape
from mindspeed_cp.data.trajectory_lines import TrajectoryFiles, TrajectoryGroup
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, PackedTrajectories, ragged_arange


class GroupSource(Protocol):
    """Groups numbered from 0: those of files, or generated ones."""

    def __len__(self) -> int: ...

    def name(self, group: int) -> str:
        """Return the name of a group for messages."""

    def read(self, group: int) -> TrajectoryGroup:
        """Return a group, the same at every call."""


class TrajectoryCorpus:
    """Groups of trajectories as documents of a corpus.

    Args:
        groups: where groups come from.
        min_shared: least number of first tokens that trajectories must have in common to be one tree.
        context: largest number of tree tokens of a group; None: any.

    Attributes:
        flat_lengths: tokens of all trajectories of each group, int64 [groups].
        group_digests: digest of all that each group is: trees, tokens, trajectories, weights; 8 bytes each.

    Raises:
        ConfigError: a group is not valid, or has more tree tokens than the context; names it.
    """

    def __init__(self, groups: GroupSource, min_shared: int = 1, context: int | None = None) -> None:
        self._source, self._min_shared = groups, min_shared
        self._last: tuple[int, PackedTrajectories, Sequence[np.ndarray]] | None = None
        shapes, self.group_digests = [], list[bytes]()
        flat, self._targets = np.zeros(len(groups), np.int64), 0
        for number in range(len(groups)):
            packed, weights = self.group(number)
            if context is not None and packed.documents.tokens > context:
                raise ConfigError(
                    f"{groups.name(number)}: has {packed.documents.tokens} tree tokens ({packed.flat_tokens} of its "
                    f"{len(packed.tree_tokens)} trajectories), and data.seq_length = {context}; a group is not cut: "
                    "valid: data.seq_length of so many or more, or fewer or shorter trajectories"
                )
            shapes.append((packed.documents.lengths, packed.documents.parents))
            flat[number] = packed.flat_tokens
            self._targets += int(sum(np.count_nonzero(weight[1:]) for weight in weights))
            self.group_digests.append(_digest(packed, weights))
        counts = [len(lengths) for lengths, _ in shapes]
        self._node_offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._node_lengths = np.concatenate([np.zeros(0, np.int64), *(lengths for lengths, _ in shapes)])
        self._node_parents = np.concatenate([np.zeros(0, np.int64), *(parents for _, parents in shapes)])
        sums = np.concatenate([[0], np.cumsum(self._node_lengths)])[self._node_offsets]
        self._lengths = np.diff(sums).astype(np.int64)
        for array in (self._lengths, flat):
            array.setflags(write=False)
        self.flat_lengths = flat

    def __len__(self) -> int:
        return len(self._lengths)

    def __repr__(self) -> str:
        return (
            f"TrajectoryCorpus({len(self)} groups, {int(self._lengths.sum())} tree tokens of "
            f"{int(self.flat_lengths.sum())})"
        )

    @property
    def lengths(self) -> np.ndarray:
        """Number of tree tokens of each group, int64 [groups], read-only."""
        return self._lengths

    @property
    def learned_tokens(self) -> int:
        """Number of trajectory tokens to predict that have a weight."""
        return self._targets

    @property
    def most_repeated(self) -> int:
        """Upper bound of the trajectory tokens for which a tree token stands, on average over any group."""
        return int((-(-self.flat_lengths // np.maximum(self._lengths, 1))).max(initial=1))

    def name(self, group: int) -> str:
        """Return the name of a group."""
        return self._source.name(group)

    def group(self, group: int) -> tuple[PackedTrajectories, Sequence[np.ndarray]]:
        """Return the trees of a group, and the loss weights of each trajectory's tokens, fp64 [length] each.

        Raises:
            ConfigError: its file has been removed or changed since the corpus was opened.
        """
        if self._last is None or self._last[0] != group:
            given = self._source.read(group)
            packed = Documents.from_trajectories(given.trajectories, self._min_shared, must_share=False)
            self._last = group, packed, given.weights
        return self._last[1:]

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return tree tokens start .. stop-1 of a group, int64 [stop - start]; by default all."""
        return self.group(document)[0].tokens[start:stop]

    def documents(self, groups: np.ndarray) -> Documents:
        """Return the documents of some groups one after the other, with parents.

        Args:
            groups: numbers of groups, int64 [n].
        """
        nodes, counts = self._nodes(groups)
        parents = self._node_parents[nodes]
        before = np.repeat(np.cumsum(counts) - counts, counts)
        return Documents(self._node_lengths[nodes], np.where(parents < 0, -1, parents + before))

    def sum_of_groups(self, groups: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Sum values of the documents of some groups, [documents], over each group, [n]."""
        _, counts = self._nodes(groups)
        return np.bincount(np.repeat(np.arange(len(groups)), counts), values, len(groups))

    def _nodes(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents of some groups among those of all, and the number of each group."""
        first, counts = self._node_offsets[groups], self._node_offsets[groups + 1] - self._node_offsets[groups]
        return ragged_arange(first, counts), counts


def open_trajectories(
    source: str, min_shared: int = 1, context: int | None = None, shape: RolloutShape | None = None, seed: int = 0
) -> TrajectoryCorpus:
    """Open a corpus of groups of trajectories.

    Args:
        source: "rollouts", groups generated from the standard library of Python; a .jsonl file with a group on each
            line (:mod:`mindspeed_cp.data.trajectory_lines`); or a folder, which is searched with its subfolders.
        min_shared, context: as for TrajectoryCorpus.
        shape, seed: sizes of generated groups, and the seed of their draws.

    Raises:
        ConfigError: the source does not exist or has no group, or a group is not valid; names it.
    """
    if source == ROLLOUTS:
        return TrajectoryCorpus(Rollouts(open_corpus(STDLIB), shape or RolloutShape(), seed), min_shared, context)
    root, paths = user_files(source, (JSON_LINES,), ROLLOUTS)
    corpus = TrajectoryCorpus(TrajectoryFiles(paths), min_shared, context)
    if not len(corpus):
        raise ConfigError(f"corpus {printable_path(root)}: has no group; its {JSON_LINES} files have no lines")
    return corpus


def _digest(packed: PackedTrajectories, weights: Sequence[np.ndarray]) -> bytes:
    digest = blake2b(digest_size=8)
    arrays = [packed.documents.lengths, packed.documents.parents, packed.tokens, *packed.tree_tokens]
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
    for array in weights:
        digest.update(array.astype("<f8").tobytes())
    return digest.digest()


def concatenate(groups: Sequence[PackedTrajectories], documents: Documents) -> PackedTrajectories:
    """Return the trajectories of some groups as one batch.

    Args:
        groups: the groups.
        documents: their documents, one group after the other; documents of no token between them are allowed.
    """
    offsets = np.cumsum([0, *(len(group.tokens) for group in groups)])
    return PackedTrajectories(
        documents,
        np.concatenate([np.zeros(0, np.int64), *(group.tokens for group in groups)]),
        tuple(path + offset for group, offset in zip(groups, offsets[:-1], strict=True) for path in group.tree_tokens),
    )
