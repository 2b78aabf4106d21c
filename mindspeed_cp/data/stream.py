"""Rows of packed documents, ready to be planned and sharded: tokens, labels, loss mask."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_cp.data.bytes import EOD
from mindspeed_cp.data.corpus import Corpus
from mindspeed_cp.data.dealing import Dealer, Dealt
from mindspeed_cp.data.packing import Packer
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents

LOOKAHEAD = 64


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One row of T <= context tokens: whole documents back to back.

    Labels are shifted here, inside each document and before any sharding, so no rank needs a neighbour's token. A
    document's last token has nothing to predict: its label is EOD and its loss mask 0::

        tokens     a b EOD | x y z EOD
        labels     b EOD .   y z EOD .
        loss_mask  1 1   0   1 1 1   0
    """

    tokens: np.ndarray  # int64 [T]
    labels: np.ndarray  # int64 [T]
    loss_mask: np.ndarray  # float32 [T]
    documents: Documents  # their lengths add up to T; those of other micro-batches, if they are here, have length 0
    index: int  # number of the row, counted over all replicas
    drawn_as: int  # tells what attention drops here from what it drops elsewhere, with the documents' numbers


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """What one replica has of a global batch: its micro-batches, and how all of it was dealt."""

    rows: list[PackedRow]
    dealt: Dealt


class PackedStream:
    """An endless iterator over `PackedRow`s, shuffled anew in each epoch.

    The sequence of rows depends on the corpus' lengths, `context`, `seed` and `lookahead` alone; of `replicas`
    replicas, number `replica` takes rows replica, replica + replicas, ... Replicas that took equally many rows have
    equal states, so one state serves all of them, and another number of replicas goes on at the same row. `next_batch`
    takes the rows of a whole global batch at once, and may deal its documents otherwise.

    Args:
        corpus: the documents; see `open_corpus`.
        context: most tokens of a row, at least 2. Longer documents are cut into pieces of at most `context` tokens,
            each a document of its own; `cut_documents` says how many are.
        seed: of the shuffle, at least 0.
        replica, replicas: which rows this stream yields.
        lookahead: how many pieces wait for a place; more fill the rows better and change their order more.

    Raises:
        ConfigError: an argument is out of range, or the corpus has no tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        context: int,
        seed: int,
        replica: int = 0,
        replicas: int = 1,
        *,
        lookahead: int = LOOKAHEAD,
    ) -> None:
        context, seed, lookahead = (operator.index(n) for n in (context, seed, lookahead))
        for name, value, least in (("context", context, 2), ("seed", seed, 0), ("lookahead", lookahead, 1)):
            if value < least:
                raise ConfigError(f"{name} = {value}: must be {least} or more")
        if not 0 <= replica < replicas:
            raise ConfigError(f"replica = {replica}: must be 0 or more and less than replicas = {replicas}")
        lengths = np.ascontiguousarray(corpus.lengths, np.int64)
        if lengths.sum() < 1:
            raise ConfigError(f"the corpus has {len(lengths)} documents and no tokens; give one with some")
        self.corpus, self.context, self.seed = corpus, context, seed
        self.replica, self.replicas = replica, replicas
        #: How many documents of the corpus are longer than the context, and so are cut in every epoch.
        self.cut_documents = int(np.count_nonzero(lengths > context))
        self._packer = Packer(lengths, context, seed, lookahead)
        self._fixed = {
            "corpus": hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest(),
            "context": context,
            "seed": seed,
            "lookahead": lookahead,
        }
        self._rows = 0  # of all replicas
        self._tokens = 0  # in those rows

    def __iter__(self) -> Iterator[PackedRow]:
        return self

    def __next__(self) -> PackedRow:
        """The next row of this replica. One that cannot be read is not passed over: the stream stays where it was.

        Raises:
            ConfigError: the corpus is not what it was when it was opened.
        """
        with self._unless_it_fails():
            rows = [self._packer.next_row() for _ in range(self.replicas)]
            row = self._load(rows[self.replica], self._rows + self.replica)
        self._count(rows)
        return row

    def next_batch(self, rows: int, dealer: Dealer) -> GlobalBatch:
        """This replica's micro-batches of the next `rows` rows, which are a global batch, dealt by `dealer`.

        No document leaves its global batch: behind it the stream stands where it would stand had its rows been taken
        one by one. With balance "none" they are the same rows. A batch that cannot be read is not passed over.

        Args:
            rows: of all replicas; a multiple of their number.
            dealer: for as many replicas, and rows of this context.

        Raises:
            ConfigError: the corpus is not what it was when it was opened, or the dealer is for others.
        """
        for name, value, own in (
            ("replicas", dealer.replicas, self.replicas),
            ("context", dealer.context, self.context),
        ):
            if value != own:
                raise ConfigError(f"the dealer's {name} = {value}: the stream has {own}; give both the same")
        if rows < 1 or rows % self.replicas:
            raise ConfigError(f"rows = {rows}: a global batch is a multiple of the {self.replicas} replicas")
        with self._unless_it_fails():
            drawn = [self._packer.next_row() for _ in range(rows)]
            dealt = dealer(drawn)
            mine = [
                self._load_numbers(dealt.pieces, numbers, at * self.replicas + self.replica, dealer)
                for at, numbers in enumerate(dealt.micro_batches[self.replica])
            ]
        self._count(drawn)
        return GlobalBatch(mine, dealt)

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """The packing stands where it stood before the block, if that raises."""
        before = self._packer.state_dict()
        try:
            yield
        except BaseException:
            self._packer.load_state_dict(before)
            raise

    def _count(self, rows: Sequence[np.ndarray]) -> None:
        self._rows += len(rows)
        self._tokens += sum(int(pieces["length"].sum()) for pieces in rows)

    def _load_numbers(self, pieces: np.ndarray, numbers: np.ndarray, at: int, dealer: Dealer) -> PackedRow:
        """Some documents of a global batch; `at`: number of the micro-batch among those of all replicas."""
        if dealer.balance == "none" or not dealer.keeps_numbers:
            return self._load(pieces[numbers], self._rows + at)
        mine = pieces.copy()
        others = np.ones(len(pieces), bool)
        others[numbers] = False
        mine["length"][others] = 0
        return self._load(mine, self._rows + at, drawn_as=self._rows)

    def _load(self, pieces: np.ndarray, index: int, drawn_as: int | None = None) -> PackedRow:
        documents = Documents(pieces["length"])
        tokens = np.empty(documents.tokens, np.int64)
        for (document, start, length), at in zip(pieces.tolist(), documents.offsets[:-1].tolist(), strict=True):
            content = self.corpus.tokens(document, start, start + length) if length else tokens[:0]
            if content.shape != (length,):
                raise ConfigError(
                    f"document {document}: the corpus gave an array of shape {list(content.shape)} for the {length} "
                    f"tokens from {start} on; a corpus must give the tokens that its lengths promise"
                )
            tokens[at : at + length] = content
        last = documents.offsets[1:][documents.lengths > 0] - 1
        labels = np.append(tokens[1:], EOD)
        labels[last] = EOD
        loss_mask = np.ones(len(tokens), np.float32)
        loss_mask[last] = 0.0
        return PackedRow(tokens, labels, loss_mask, documents, index, index if drawn_as is None else drawn_as)

    @property
    def epoch(self) -> int:
        """How often the corpus has been gone through before the newest row."""
        return self._packer.epoch

    @property
    def fill(self) -> float:
        """Tokens of the rows so far, of all replicas, as a part of rows * context; 0 before the first row."""
        return self._tokens / (self._rows * self.context) if self._rows else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: numbers and a digest of the corpus' lengths, for JSON; equal on every replica."""
        return {**self._fixed, **self._packer.state_dict(), "rows": self._rows, "tokens": self._tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on exactly where `state` was taken, at any number of replicas.

        Raises:
            ConfigError: the state is of another corpus, context, seed or lookahead, or is incomplete.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ConfigError(f"the saved state of the data lacks {', '.join(sorted(missing))}; start without it")
        for name, value in self._fixed.items():
            if state[name] != value:
                was, now = ("another", "this one") if name == "corpus" else (state[name], value)
                raise ConfigError(
                    f"{name} = {now}: the saved run had {was}; resume with the same, or start without a checkpoint"
                )
        self._packer.load_state_dict(state)
        self._rows, self._tokens = state["rows"], state["tokens"]
