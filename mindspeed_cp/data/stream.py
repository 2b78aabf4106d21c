"""Packed rows of several documents: packing by their lengths alone, then tokens, labels and loss mask.

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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_cp.data.corpus import EOD, FileCorpus
from mindspeed_cp.data.dispatch import DispatchedBatch, Dispatcher
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents

#: Tokens start .. start+length-1 of a document.
DOC_CHUNK = np.dtype([("document", np.int64), ("start", np.int64), ("length", np.int64)])
LOOKAHEAD = 64  # chunks from which a row is filled: more fill rows better and change the order more


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


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One row of T <= context tokens: whole documents back to back.

    Labels are shifted here, inside each document and before any sharding, so no rank needs a token of another rank. The
    last token of a document predicts nothing: its label is EOD and its loss mask 0::

        tokens     a b EOD | x y z EOD
        labels     b EOD .   y z EOD .
        loss_mask  1 1   0   1 1 1   0
    """

    tokens: np.ndarray  # int64 [T]
    labels: np.ndarray  # int64 [T]
    loss_mask: np.ndarray  # float32 [T]
    documents: Documents  # the lengths add up to T; documents of other micro-batches, if present, have length 0
    index: int  # number of the row, counted over all replicas
    dropout_stream_id: int  # with the index of a document, it identifies the dropped attention weights


class PackedStream:
    """Iterator over `PackedRow`s without end, shuffled anew in each epoch.

    The sequence of rows depends only on the lengths of the corpus, `context` and `seed`. Replica `replica`
    of `replicas` takes rows replica, replica + replicas, ... After equally many rows all replicas have equal states, so
    one state serves all of them, also with another number of replicas. `next_batch` takes the rows of a whole global
    batch, and may assign its documents to other replicas.

    Args:
        corpus: documents, for example from `open_corpus`.
        context: maximum number of tokens in a row, at least 2. Longer documents are cut into chunks of at most
            `context` tokens, each a document of its own.
        seed: seed of the shuffle, at least 0.
        replica, replicas: index of this stream's replica, and number of replicas.
    """

    def __init__(self, corpus: FileCorpus, context: int, seed: int, replica: int = 0, replicas: int = 1) -> None:
        self.corpus, self.replica, self.replicas = corpus, replica, replicas
        self._packer = Packer(corpus.lengths, context, seed, LOOKAHEAD)
        self._rows = 0  # of all replicas

    def __iter__(self) -> Iterator[PackedRow]:
        return self

    def __next__(self) -> PackedRow:
        """Return the next row of this replica."""
        rows = [self._packer.next_row() for _ in range(self.replicas)]
        row = self._load(rows[self.replica], self._rows + self.replica)
        self._rows += len(rows)
        return row

    def next_batch(self, rows: int, dispatcher: Dispatcher) -> tuple[list[PackedRow], DispatchedBatch]:
        """Return this replica's micro-batches of the next `rows` rows, a global batch that `dispatcher` assigns, and
        its assignment; where that is pooled, the micro-batches are those of all replicas.

        Documents stay in their global batch, so the state of the stream afterwards is the same as if its rows had been
        taken one by one. With balance "none" they are the same rows.

        Args:
            rows: number of rows of all replicas, a multiple of their number.
            dispatcher: dispatcher for the same number of replicas and the same context.
        """
        drawn = [self._packer.next_row() for _ in range(rows)]
        dispatched = dispatcher(drawn)
        replica = 0 if dispatched.pooled else self.replica  # the first one of those with these rows
        replica_rows = [
            self._load_numbers(dispatched.chunks, numbers, number * self.replicas + replica, dispatcher)
            for number, numbers in enumerate(dispatched.micro_batches[self.replica])
        ]
        self._rows += len(drawn)
        return replica_rows, dispatched

    def _load_numbers(self, chunks: np.ndarray, numbers: np.ndarray, index: int, dispatcher: Dispatcher) -> PackedRow:
        """Load some chunks of a global batch; `index` numbers the micro-batches of all replicas."""
        if dispatcher.balance == "none" or not dispatcher.keeps_document_numbers:
            return self._load(chunks[numbers], self._rows + index)
        row_chunks = chunks.copy()
        in_other_rows = np.ones(len(chunks), bool)
        in_other_rows[numbers] = False
        row_chunks["length"][in_other_rows] = 0
        return self._load(row_chunks, self._rows + index, dropout_stream_id=self._rows)

    def _load(self, chunks: np.ndarray, index: int, dropout_stream_id: int | None = None) -> PackedRow:
        """Load the row of some chunks; those of other micro-batches have length 0."""
        documents = Documents(chunks["length"])
        tokens = np.empty(documents.tokens, np.int64)
        for (document, start, length), offset in zip(chunks.tolist(), documents.offsets[:-1].tolist(), strict=True):
            if length:
                tokens[offset : offset + length] = self.corpus.tokens(document, start, start + length)
        last = documents.offsets[1:][documents.lengths > 0] - 1
        labels = np.append(tokens[1:], EOD)
        labels[last] = EOD
        loss_mask = np.ones(len(tokens), np.float32)
        loss_mask[last] = 0.0
        return PackedRow(
            tokens, labels, loss_mask, documents, index, index if dropout_stream_id is None else dropout_stream_id
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and the digest of the corpus, for JSON; equal on every replica."""
        return {"corpus": self.corpus.digest, **self._packer.state_dict(), "rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken by a stream of equal context and seed, with any number of replicas.

        Raises:
            ConfigError: the state is for another corpus.
        """
        if state["corpus"] != self.corpus.digest:
            raise ConfigError(
                "data.corpus: has other documents than the saved run had; put the old ones back to go on, or give "
                "another output.folder to start anew"
            )
        self._packer.load_state_dict(state)
        self._rows = state["rows"]
