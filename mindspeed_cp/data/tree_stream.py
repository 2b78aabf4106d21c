"""Rows of prefix trees: whole groups of trajectories back to back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_cp.data.byte_tokenizer import EOD
from mindspeed_cp.data.corpus import Corpus
from mindspeed_cp.data.stream import PackedRow, PackedStream
from mindspeed_cp.data.trajectory_corpus import TrajectoryCorpus, concatenate
from mindspeed_cp.layout import PackedTrajectories


@dataclass(frozen=True, eq=False)
class TreeRow(PackedRow):
    """One row of trees.

    Labels and loss mask are the first target of each token that has one, and its weight; a token that several
    trajectories continue differently has more targets, which `trajectories` lists.

    Attributes:
        trajectories: the trajectories of the row's groups.
        weights: loss weights of each trajectory's tokens, fp64 [length] each.
    """

    trajectories: PackedTrajectories
    weights: Sequence[np.ndarray]

    @property
    def flat_tokens(self) -> int:
        return self.trajectories.flat_tokens

    @property
    def contents(self) -> tuple[np.ndarray, ...]:
        targets = self.trajectories.targets
        weights = targets.weights(self.weights).view(np.uint32)
        return self.tokens, self.documents.lengths, self.documents.parents + 1, targets.source, targets.token, weights


class TreeStream(PackedStream):
    """Rows of whole groups of trajectories; arguments and laws are those of PackedStream.

    Args:
        corpus: groups of at most `context` tree tokens.
        arguments, named: as for PackedStream.
    """

    corpus: TrajectoryCorpus

    def _load(self, chunks: np.ndarray, index: int, dropout_stream_id: int | None = None) -> TreeRow:
        shapes = self.corpus.documents(chunks["document"])
        present = chunks["document"][chunks["length"] > 0]
        groups = [self.corpus.group(number) for number in present.tolist()]
        documents = shapes
        if len(present) < len(chunks):
            sizes = self.corpus.sum_of_groups(chunks["document"], np.ones(len(shapes))).astype(np.int64)
            documents = shapes.with_lengths(np.where(np.repeat(chunks["length"] > 0, sizes), shapes.lengths, 0))
        packed = concatenate([group for group, _ in groups], documents)
        weights = [weight for _, of_group in groups for weight in of_group]
        targets = packed.targets
        labels, loss_mask = np.full(len(packed.tokens), EOD), np.zeros(len(packed.tokens), np.float32)
        first = targets.is_first
        labels[targets.source[first]] = targets.token[first]
        loss_mask[targets.source[first]] = targets.weights(weights)[first]
        stream_id = index if dropout_stream_id is None else dropout_stream_id
        return TreeRow(packed.tokens, labels, loss_mask, documents, index, stream_id, packed, weights)


def open_stream(corpus: Corpus, *arguments: Any, **named: Any) -> PackedStream:
    """Return the stream of rows of a corpus; arguments as for PackedStream."""
    kind = TreeStream if isinstance(corpus, TrajectoryCorpus) else PackedStream
    return kind(corpus, *arguments, **named)
