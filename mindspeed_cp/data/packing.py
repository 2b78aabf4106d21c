"""Packing of documents into rows, by their lengths alone.

Documents longer than the context are cut into chunks. Each epoch shuffles all chunks, so that a long document does not
fill many consecutive rows, and packs them into rows::

    documents               a: 5 tokens   b: 11       c: 2    d: 3           context 8
    chunks, shuffled        a[0:5]   c[0:2]   b[8:11]   b[0:8]   d[0:3]
    rows                    [ a[0:5] | b[8:11] ]   [ c[0:2] | d[0:3] ]   [ b[0:8] ]

A row begins with the oldest of the next `lookahead` chunks, so that every chunk is used, and is filled with the longest
ones that fit. Rows never mix epochs: every epoch has every token exactly once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any

import numpy as np

#: Tokens start .. start+length-1 of a document.
DOC_CHUNK = np.dtype([("document", np.int64), ("start", np.int64), ("length", np.int64)])


def epoch_order(chunks: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the chunks in an epoch: a permutation, int64 [chunks].

    Chunks are sorted by raw PCG64 numbers. NumPy guarantees these for all releases, but not `Generator.permutation`,
    and a run must resume in the same order under another NumPy.
    """
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(chunks), kind="stable")


def chunk_documents(lengths: np.ndarray, context: int) -> np.ndarray:
    """Cut all documents into chunks of `context` tokens and a remainder: DOC_CHUNK [chunks], in document order."""
    counts = -(-lengths // context)
    first = np.repeat(np.cumsum(counts) - counts, counts)  # number of the first chunk of the same document
    chunks = np.empty(int(counts.sum()), DOC_CHUNK)
    chunks["document"] = np.repeat(np.arange(len(lengths)), counts)
    chunks["start"] = (np.arange(len(chunks)) - first) * context
    chunks["length"] = np.minimum(lengths[chunks["document"]] - chunks["start"], context)
    return chunks


class Packer:
    """Packs rows of chunks without end; equal arguments give equal rows on every machine.

    Args:
        lengths: tokens of each document, int64 [documents]; at least one is not zero.
        context: maximum number of tokens in a row.
        seed: seed of the shuffle.
        lookahead: number of chunks from which a row is filled.
    """

    def __init__(self, lengths: np.ndarray, context: int, seed: int, lookahead: int) -> None:
        self.lengths, self.context, self.seed, self.lookahead = lengths, context, seed, lookahead
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        chunks = chunk_documents(self.lengths, self.context)
        self._chunks = chunks[epoch_order(len(chunks), self.seed, epoch)]
        self._next = 0  # first chunk of the epoch that is not yet waiting
        self._waiting: dict[int, None] = {}  # chunk numbers, the oldest first
        self._by_length: list[tuple[int, int]] = []  # (length, -chunk), ascending

    def next_row(self) -> np.ndarray:
        """Return the chunks of the next row in their order: DOC_CHUNK [chunks], at least one."""
        if not self._waiting and self._next == len(self._chunks):
            self._begin(self.epoch + 1)
        self._refill()
        row = [self._take(next(iter(self._waiting)))]
        room = self.context - int(self._chunks["length"][row[0]])
        while (longest := bisect_right(self._by_length, (room, 0)) - 1) >= 0:
            length, negative_chunk = self._by_length[longest]  # of equal lengths the oldest chunk
            row.append(self._take(-negative_chunk))
            room -= length
        return self._chunks[row]

    def _take(self, chunk: int) -> int:
        del self._waiting[chunk]
        del self._by_length[bisect_left(self._by_length, (int(self._chunks["length"][chunk]), -chunk))]
        self._refill()
        return chunk

    def _refill(self) -> None:
        while len(self._waiting) < self.lookahead and self._next < len(self._chunks):
            self._wait(self._next)
            self._next += 1

    def _wait(self, chunk: int) -> None:
        self._waiting[chunk] = None
        insort(self._by_length, (int(self._chunks["length"][chunk]), -chunk))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, its next chunk and the waiting chunks: a few numbers, for JSON."""
        return {"epoch": self.epoch, "next": self._next, "waiting": list(self._waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of a Packer with equal arguments."""
        self._begin(state["epoch"])
        for chunk in state["waiting"]:
            self._wait(chunk)
        self._next = state["next"]
