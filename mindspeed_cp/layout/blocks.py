"""Blocks: runs of tokens of a document that see each other both ways under a causal mask.

Image tokens inside a text, or the prompt of a prefix language model. A query in a block sees, besides what the mask
lets it see, the whole block; a window does not hide tokens of its own block. All other queries see blocks causally::

    tokens    a b [c d e] f       a sees a, b sees a b, c and d and e see a b c d e, f sees a b c d e f
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.runs import ragged_arange


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a batch, ascending.

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
